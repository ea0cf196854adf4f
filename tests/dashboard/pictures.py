"""`make pictures`: the pictures of the dashboard in docs/pictures, of a real busy broker (busy.py).

Arguments name some pictures, as `schedules schedules-dark`. Without arguments all pictures are made.

Each is a screenshot with a reduced palette, which needs a third of the bytes and shows no visible difference.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image  # comes with matplotlib
from playwright.sync_api import Browser, Page, expect
from tests.dashboard.browser import PAGES, PHONE, Tab, chromium
from tests.dashboard.busy import busy_node

FOLDER = Path(__file__).parents[2] / "docs/pictures"
PAGES_SHOWN = (*PAGES, "reference")
TALL = {"width": 1280, "height": 1450}
# The options of the tab for each picture: each page in both colour schemes, and one page on a phone.
PICTURES: dict[str, dict[str, Any]] = {
    **{page: {"color_scheme": "light"} for page in PAGES_SHOWN},
    **{f"{page}-dark": {"color_scheme": "dark"} for page in PAGES_SHOWN},
    "push-phone": {"viewport": PHONE},
    # These are so tall that the day view below the list is visible.
    "schedules": {"color_scheme": "light", "viewport": TALL},
    "schedules-dark": {"color_scheme": "dark", "viewport": TALL},
}
SCHEDULED = 60_000
CHARTS = ("punctual", "coming")  # pages whose charts grow with the time
WATCHED_MS = 90_000  # time for which pages with charts collect data
COLOURS = 128


def main() -> None:
    names = sys.argv[1:] or list(PICTURES)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        with busy_node(Path(folder) / "data", SCHEDULED) as node:
            # Few tabs are open at a time: each takes CPU from the broker, and its messages would be late in the charts.
            charts = [name for name in names if name.startswith(CHARTS)]
            take(browser, node.node.http_port, charts, WATCHED_MS)
            for name in names:
                if name not in charts:
                    take(browser, node.node.http_port, [name], 0)


def take(browser: Browser, port: int, names: Sequence[str], watched_ms: int) -> None:
    """Open tabs, wait for `watched_ms`, write their pictures, and close them."""
    tabs = {name: Tab(browser, port, **PICTURES[name]) for name in names}
    for name, tab in tabs.items():
        open_page(tab, name)
    for name, tab in tabs.items():
        tab.page.bring_to_front()
        tab.page.wait_for_timeout(watched_ms)
        watched_ms = 0  # all tabs have been open for this long
        expect(tab.page.locator("#live[data-state=live], .operations").first).to_be_visible()
        path = FOLDER / f"dashboard-{name}.png"
        tab.page.screenshot(path=path)
        shrink(path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")
        assert not tab.faults, tab.faults
    for tab in tabs.values():
        tab.close()


def open_page(tab: Tab, name: str) -> Page:
    """Open the page that a picture shows."""
    page = name.removesuffix("-phone").removesuffix("-dark")
    if page != "reference":
        return tab.open(page)
    tab.page.goto(f"{tab.origin}/docs")
    return tab.page


def shrink(path: Path) -> None:
    """Reduce the palette of a picture in its file."""
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


if __name__ == "__main__":
    main()
