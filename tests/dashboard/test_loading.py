"""A page shows that there is no data only after an answer of the broker. Before, it shows why it has none."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from tests.dashboard.answers import BusyBroker
from tests.dashboard.browser import PAGES, Tab

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]


def assert_no_data_shown(page: Page) -> None:
    """Check that no figure, no table and no text about missing data is visible."""
    expect(page.locator("#page .empty:visible, #page table:visible, #page .tile:visible")).to_have_count(0)


def test_a_page_shows_loading_until_the_broker_answers(tab: Tab) -> None:
    tab.page.route("**/v1/**", lambda route: None)  # the request gets no answer
    for name in PAGES:
        page = tab.open(name)
        expect(page.locator("#page .loading:visible")).to_have_text("Loading …")
        assert_no_data_shown(page)
    tab.page.unroute_all(behavior="ignoreErrors")
    tab.answer(BusyBroker())
    for name in PAGES:
        page = tab.open(name)
        page.reload()
        expect(page.locator("#page .loading:visible")).to_have_count(0)
        expect(page.locator("#page .card:visible").first).to_be_visible()


def test_a_page_without_a_connection_shows_that_there_is_no_answer(tab: Tab) -> None:
    tab.allowed = {0}
    tab.page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    for name in PAGES:
        page = tab.open(name)
        expect(page.locator("#page .loading:visible")).to_contain_text("No answer yet")
        assert_no_data_shown(page)


def test_a_page_that_is_refused_shows_the_reason(tab: Tab) -> None:
    tab.allowed = {403}

    def refuse(route: Route) -> None:
        problem = {"title": "forbidden", "status": 403, "code": "forbidden", "detail": "it has no grant"}
        route.fulfill(status=403, content_type="application/problem+json", json=problem)

    tab.page.route("**/v1/**", refuse)
    for name in PAGES:
        page = tab.open(name)
        expect(page.locator("#page .verdict:visible").first).to_contain_text("may not look at this")
        expect(page.locator("#page .loading:visible")).to_have_count(0)
        assert_no_data_shown(page)


def test_a_new_search_shows_loading_again(tab: Tab) -> None:
    page = tab.open("waiting")
    expect(page.locator("#page .empty")).to_be_visible()
    page.route("**/v1/messages?**", lambda route: None)
    page.get_by_label("Text").fill("order-17")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#page .loading")).to_be_visible()
    assert_no_data_shown(page)


class LateBroker(BusyBroker):
    """A broker whose latest release was late by 14 s, and so is counted in the bucket of up to a minute."""

    def __call__(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        """Answer as a busy broker, with another lateness."""
        status, value = super().__call__(method, path, query)
        if path == "/v1/broker":
            buckets = {"<=1ms": 50, "<=60000ms": 50}
            value["lateness"] = {"released": 100, "max_ms": 14_000, "buckets": buckets}
        return status, value


def test_a_percentile_is_never_shown_above_the_maximum(tab: Tab) -> None:
    tab.answer(LateBroker())
    page = tab.open("punctual")
    expect(page.locator("#page .tile", has_text="since the start").first).to_contain_text("≤ 14 s")
    expect(page.locator("#page")).not_to_contain_text("≤ 1 min")
