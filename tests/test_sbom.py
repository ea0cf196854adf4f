"""The bills of materials of `make sbom`: each names every package of its lock file, with version and hashes.

The tool is there after `make sbom`, and in `make slow`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import Any

import pytest
from tests.docs_pages import ROOT

from timeball import __version__

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sbom"),  # all are made once
    pytest.mark.skipif(
        not (ROOT / ".venv/release").exists(),
        reason="no CycloneDX here: `make sbom` and `make slow` install it",
    ),
]
LOCKS = ("client", "cli", "broker", "image", "all")


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sbom")
    # Make would set the tool up anew for a lock file that is younger; that is tried by `make slow` itself.
    command = ["make", "--old-file=.venv/release", "sbom", f"SBOM_IN={folder}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert set(found) == {f"timeball-{name}.cdx.json" for name in LOCKS}
    return found


def locked(name: str) -> dict[str, tuple[str, set[str]]]:
    """Return each package of a lock file with its version and hashes, read line by line."""
    found: dict[str, tuple[str, set[str]]] = {}
    package = ""
    for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
        if match := re.match(r"([a-z0-9][a-z0-9._-]*)==(\S+)", line):
            package = match[1]
            found[package] = (match[2], set())
        if match := re.match(r"\s+--hash=sha256:(\w{64})", line):
            found[package][1].add(match[1])
    return found


def direct(name: str) -> set[str]:
    """Return the packages that pyproject.toml itself names for a lock file: of the client, or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"].get({"image": "broker"}.get(name, name), [])
    named = {re.split(r"[\[<>=~!; ]", line)[0] for line in [*project["dependencies"], *extra]}
    return named - {"timeball"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_the_lock_file_is_named(bills: dict[str, dict[str, Any]], name: str) -> None:
    wanted = locked(name)
    assert len(direct(name)) >= 2 and direct(name) <= set(wanted)
    assert all(hashes for _, hashes in wanted.values())
    bill = bills[f"timeball-{name}.cdx.json"]
    told = {
        each["name"]: (
            each["version"],
            {
                digest["content"]
                for reference in each["externalReferences"]
                for digest in reference.get("hashes", [])
            },
        )
        for each in bill["components"]
    }
    assert told == wanted
    assert all(each["purl"].startswith(f"pkg:pypi/{each['name']}@") for each in bill["components"])


def test_it_is_the_bill_of_this_version(bills: dict[str, dict[str, Any]]) -> None:
    for bill in bills.values():
        about = bill["metadata"]["component"]
        assert (bill["bomFormat"], about["name"], about["version"]) == ("CycloneDX", "timeball", __version__)
