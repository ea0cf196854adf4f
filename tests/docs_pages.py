"""The pages of the documentation, and functions that find sections and tables in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def page(name: str) -> str:
    """Read a page."""
    return (ROOT / name).read_text("utf-8")


def section(text: str, heading: str) -> str:
    """Return the lines below a heading, up to the next one of the same or a higher level, or "" without the heading."""
    match = re.search(rf"^(#+) {re.escape(heading)}\n", text, re.MULTILINE)
    if not match:
        return ""
    level = len(match[1])
    end = re.search(rf"^#{{1,{level}}} ", text[match.end() :], re.MULTILINE)
    return text[match.end() :][: end.start() if end else None]


def first_cells(text: str) -> set[str]:
    """Return the words in the first column of the tables, without marks."""
    cells: set[str] = set()
    for line in text.splitlines():
        if line.startswith("|"):
            cells |= set(re.split(r"[`,\s]+", line.split("|")[1]))
    return cells
