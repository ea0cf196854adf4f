"""Every page of a busy broker, in both colour schemes and on a phone: none is empty, too wide, or inaccessible.

Pictures of all pages go to `.interop/dashboard`. The pictures in docs/ are made by `make pictures`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.browser import PAGES, PHONE, Tab, overflow
from tests.dashboard.busy import busy_node
from tests.dashboard.pictures import FOLDER, PICTURES
from tests.dashboard.test_pages import accessibility_faults
from tests.node_fixture import RunningNode

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]
OPTIONS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": PHONE, "has_touch": True},
}
PICTURE_BYTES_MAX = 150 * 1024


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A busy node, in the place of the empty one of conftest.py."""
    with busy_node(tmp_path_factory.mktemp("busy") / "data") as running:
        yield running


def wait_until_filled(page: Page, name: str) -> None:
    """Wait until a page shows figures, and no part of it says that there is no data."""
    if name == "punctual":
        expect(page.locator(".line.p99")).to_have_attribute("d", re.compile("H"))
    elif name == "coming":
        expect(page.locator(".level:visible").first).to_be_visible()
    elif name == "node":
        expect(page.get_by_text("Rows kept")).to_be_visible()
    else:
        expect(page.locator("tbody tr").first).to_be_visible()
    expect(page.locator(".empty:visible")).to_have_count(0)
    expect(page.locator("#page > .verdict:visible")).to_have_count(0)


@pytest.mark.parametrize("screen", OPTIONS)
def test_pages_of_a_busy_broker_are_filled_fit_their_screen_and_are_accessible(
    tabs: Callable[..., Tab], axe: str, screen: str
) -> None:
    tab = tabs(**OPTIONS[screen])
    faults: dict[str, list[str]] = {}
    for name in PAGES:
        page = tab.open(name)
        wait_until_filled(page, name)
        tab.shoot(f"busy-{name}-{screen}")
        assert overflow(page) <= 0, name
        faults[name] = accessibility_faults(page, axe)
    assert not any(faults.values()), faults


def test_dialogs_of_a_busy_broker_fit_their_screen_and_are_accessible(
    tabs: Callable[..., Tab], axe: str
) -> None:
    for screen, options in OPTIONS.items():
        tab = tabs(**options)
        for name, opener in (
            ("waiting", "Reschedule"),
            ("dead-letters", "All of this group"),
            ("push", "New subscription"),
            ("push", "Delete"),
            ("campaigns", "Pause"),
            ("schedules", "New schedule"),
            ("schedules", "Run now"),
            ("bulk", "Undo"),
        ):
            page = tab.open(name)
            page.get_by_role("button", name=opener).first.click()
            expect(page.get_by_role("dialog")).to_be_visible()
            tab.shoot(f"busy-{name}-{opener.split()[0].lower()}-{screen}")
            assert overflow(page) <= 0
            assert not accessibility_faults(page, axe), (name, screen)
            page.keyboard.press("Escape")
            # Chromium may close the dialog late, and would then close the next dialog instead.
            expect(page.get_by_role("dialog")).to_have_count(0)


def test_each_page_has_its_picture_in_the_documentation() -> None:
    assert PICTURES.keys() >= {
        f"{page}{colours}" for page in (*PAGES, "reference") for colours in ("", "-dark")
    }
    text = Path(FOLDER.parent, "dashboard.md").read_text("utf-8")
    for name in PICTURES:
        picture = FOLDER / f"dashboard-{name}.png"
        assert 0 < picture.stat().st_size <= PICTURE_BYTES_MAX, name
        assert f"(pictures/{picture.name})" in text
    assert {f"dashboard-{name}.png" for name in PICTURES} == {
        path.name for path in FOLDER.glob("dashboard-*")
    }


def test_the_rate_of_consumers_is_drawn_over_the_due_load(tab: Tab) -> None:
    page = tab.open("coming")
    level = page.locator("li.level")
    expect(level).to_have_text("what consumers take now")
    expect(page.locator("line.level")).to_have_attribute("visibility", "visible")
    # The rate is that of all topics, which the page says beside the bars of one topic.
    page.get_by_label("Topic").select_option("orders")
    expect(level).to_contain_text("of all topics")
