"""`make pictures`: the pictures of the dashboard in docs/pictures, of a real busy broker (busy.py).

Arguments name some of them, such as `schedules schedules-dark`; without arguments all are made.

Each is a screenshot with a reduced palette: a third of the bytes, without a visible difference.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image  # comes with matplotlib
from playwright.sync_api import Page, expect
from tests.dashboard.browser import PAGES, PHONE, Tab, chromium
from tests.dashboard.busy import busy_node

FOLDER = Path(__file__).parents[2] / "docs/pictures"
PAGES_SHOWN = (*PAGES, "reference")
TALL = {"width": 1280, "height": 1450}
# Each page in both colours, and one on a phone -> how the tab is.
PICTURES: dict[str, dict[str, Any]] = {
    **{page: {"color_scheme": "light"} for page in PAGES_SHOWN},
    **{f"{page}-dark": {"color_scheme": "dark"} for page in PAGES_SHOWN},
    "push-phone": {"viewport": PHONE},
    # With the day below the list.
    "schedules": {"color_scheme": "light", "viewport": TALL},
    "schedules-dark": {"color_scheme": "dark", "viewport": TALL},
}
SCHEDULED = 60_000
WATCHED_MS = 90_000  # of history, for the charts
COLOURS = 128


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        with busy_node(Path(folder) / "data", SCHEDULED) as node:
            tabs = {}
            wanted = sys.argv[1:] or list(PICTURES)
            for name in wanted:
                options = PICTURES[name]
                tabs[name] = Tab(browser, node.node.http_port, **options)
                go(tabs[name], name)
            # The charts of these pages grow with the time.
            if {"punctual", "coming"} & tabs.keys():
                tabs[wanted[0]].page.wait_for_timeout(WATCHED_MS)
            for name, tab in tabs.items():
                tab.page.bring_to_front()
                expect(tab.page.locator("#live[data-state=live], .operations").first).to_be_visible()
                path = FOLDER / f"dashboard-{name}.png"
                tab.page.screenshot(path=path)
                shrink(path)
                print(f"{path.name}: {path.stat().st_size:,} bytes")
                assert not tab.faults, tab.faults


def go(tab: Tab, name: str) -> Page:
    page = name.removesuffix("-phone").removesuffix("-dark")
    if page != "reference":
        return tab.open(page)
    tab.page.goto(f"{tab.origin}/docs")
    return tab.page


def shrink(path: Path) -> None:
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main()
