"""What makes one site of the pages: mkdocs calls these functions by their names (mkdocs.yml).

The pages are written to be read where they lie. So README.md and its neighbours link into docs/, and pages link to
source files, which a site has not. Here the first become pages of the site, and links to the others become plain text.
A link that leads nowhere in the repository is left alone: mkdocs then fails, as the tests do.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Page of the repository -> page of the site.
BESIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting-faults.md",
}
FOLDERS = {"pipeline": "The pipeline", "formats": "Formats", "decisions": "Decisions"}
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*(?:\[[^\]]*\][^\]]*)*)\]\(([^)\s]+)\)")


def place_of(page: str) -> str:
    """Return where a page of the site lies in the repository."""
    return {site: own for own, site in BESIDE.items()}.get(page, f"docs/{page}")


def target_on_site(page: str, target: str) -> str | None:
    """Return a link of a page as the site needs it; None for what the repository has and the site has not."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return target
    name, _, anchor = target.partition("#")
    goal = posixpath.normpath(posixpath.join(posixpath.dirname(place_of(page)), name))
    if goal in BESIDE:
        found = BESIDE[goal]
    elif goal.startswith("docs/") and not (ROOT / goal).is_dir():
        found = goal.removeprefix("docs/")
    else:
        return None if (ROOT / goal).exists() else target
    relative = posixpath.relpath(found, posixpath.dirname(page) or ".")
    return f"{relative}#{anchor}" if anchor else relative


def with_links_of_site(page: str, text: str) -> str:
    """Return a page's text with the links of the site; blocks of code are left alone."""

    def link(found: re.Match[str]) -> str:
        target = target_on_site(page, found[3])
        return found[2] if target is None else f"{found[1]}[{found[2]}]({target})"

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in FENCED.split(text))


def heading_id(text: str, separator: str) -> str:
    """Return the id of a heading as GitHub makes it, which is what our links are written for."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """List the folders, and the pages that mkdocs.yml does not name."""
    docs = Path(config["docs_dir"])
    named = set(re.findall(r"[\w/.-]+\.md", str(config["nav"])))
    rest = sorted(path.name for path in docs.glob("*.md") if path.name not in named)
    reference: list[Any] = [*rest, *(site for site in BESIDE.values() if site != "index.md")]
    for folder, title in FOLDERS.items():
        pages = sorted(path.relative_to(docs).as_posix() for path in (docs / folder).glob("*.md"))
        reference.append({title: [page for page in pages if page not in named]})
    config["nav"].append({"Reference": reference})
    config["mdx_configs"].setdefault("toc", {})["slugify"] = heading_id
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for own, site in BESIDE.items():
        files.append(File.generated(config, site, content=(ROOT / own).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page."""
    return with_links_of_site(page.file.src_uri, markdown)
