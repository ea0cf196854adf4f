"""The site of `make docs`: its links are made from those of the pages, and it has every page.

`make docs` and `make slow` install mkdocs. Without it only the rewriting of links is tested.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs_pages import DOCS, ROOT, page
from tests.rounds import rounds

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="no mkdocs here: `make docs` and `make slow` install it",
)


def _hooks() -> object:
    """Import the hooks of mkdocs."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = _hooks()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("index.md", "[x](docs/http.md#send)", "[x](http.md#send)"),
        ("index.md", "![x](docs/pictures/designs.png)", "![x](pictures/designs.png)"),
        ("index.md", "[`make versus`](docs/versus.md)", "[`make versus`](versus.md)"),
        ("architecture.md", "[x](CHANGELOG.md) [y](docs/formats)", "[x](changelog.md) y"),
        ("http.md", "[x](../README.md#figures)", "[x](index.md#figures)"),
        ("http.md", "[x](decisions/0004-clock.md)", "[x](decisions/0004-clock.md)"),
        ("protocols/grpc.md", "[x](../../examples/rocketmq_grpc.py)", "x"),
        ("protocols/grpc.md", "[x](../cancel.md) [y](#codes)", "[x](../cancel.md) [y](#codes)"),
        ("http.md", "[x](gone.md)", "[x](gone.md)"),  # mkdocs notices it, and fails
        ("index.md", "```\n[x](docs/http.md)\n```\n", "```\n[x](docs/http.md)\n```\n"),
    ],
)
def test_links_lead_to_pages_of_the_site(name: str, before: str, after: str) -> None:
    assert HOOKS.with_links_of_site(name, before) == after  # type: ignore[attr-defined]


def test_headings_are_addressed_as_in_the_repository() -> None:
    assert HOOKS.heading_id("Sends, that are repeated: `now`", "-") == "sends-that-are-repeated-now"  # type: ignore[attr-defined]


def test_each_named_page_exists() -> None:
    named = re.findall(r": ([\w/.-]+\.md)$", page("mkdocs.yml"), re.M)
    own = set(HOOKS.BESIDE.values())  # type: ignore[attr-defined]
    assert len(named) > 10
    assert not [name for name in named if name not in own and not (DOCS / name).exists()]
    assert set(HOOKS.FOLDERS) <= {path.name for path in DOCS.iterdir()}  # type: ignore[attr-defined]


def build(checkout: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build as `make docs` does. With --quiet mkdocs would count no warnings, and would not fail."""
    assert "mkdocs build $(ARGS)" in page("Makefile")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.mark.slow
@needs_mkdocs
def test_the_site_has_all_pages_and_uses_no_other_host(tmp_path: Path) -> None:
    result = build(ROOT, tmp_path / "site")
    assert result.returncode == 0, result.stdout + result.stderr
    built = tmp_path / "site"
    pages = {path.relative_to(built).with_suffix(".md").as_posix() for path in built.rglob("*.html")}
    assert not {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - pages
    for path in built.rglob("*.html"):
        addresses = re.findall(
            r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\"> ]*)", path.read_text("utf-8")
        )
        assert not addresses, path.name
    entries = json.loads((built / "search/search_index.json").read_text("utf-8"))["docs"]
    named = {entry["location"] for entry in entries}
    for verb in ("send_many", "pull", "consume", "get"):
        assert f"python-api.html#timeball.client.timeball.Timeball.{verb}" in named
    reference = (built / "python-api.html").read_text("utf-8")
    assert "<blockquote>" not in reference, "an example is not shown as code"


@pytest.mark.slow
@pytest.mark.siege
@needs_mkdocs
@pytest.mark.parametrize(
    "broken",
    ["[a heading](faq.md#gone)", "[a page](gone.md)", "![a picture](pictures/gone.png)"][: rounds(1, 3)],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, broken: str) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(DOCS, checkout / "docs")
    for name in ("mkdocs.yml", *HOOKS.BESIDE):  # type: ignore[attr-defined]
        shutil.copy(ROOT / name, checkout / name)
    for name in ("src", "deploy", "examples", "tests", "benchmarks", "LICENSE"):
        (checkout / name).symlink_to(ROOT / name)
    (checkout / "docs/faq.md").write_text(page("docs/faq.md") + f"\n{broken}\n")
    result = build(checkout, tmp_path / "site")
    assert result.returncode == 1 and "gone" in result.stderr, result.stderr
