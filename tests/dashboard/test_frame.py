"""The frame of the pages: a broker out of reach, accounts, colours, keyboard, and no unnecessary requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from tests.accounts import SECRETS, guarded_node
from tests.dashboard.answers import BusyBroker
from tests.dashboard.browser import PAGES, PHONE, Tab
from tests.node_fixture import RunningNode, running_node

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]


class CountingBroker(BusyBroker):
    """A busy broker that records the paths of its requests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.requests: list[str] = []

    def __call__(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        self.requests.append(path)
        return super().__call__(method, path, query)

    def count(self, path: str) -> int:
        """Return the number of requests with this path."""
        return self.requests.count(path)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningNode]:
    with guarded_node(tmp_path, http_port=0) as running:
        yield running


def hide(page: Page, *, hidden: bool) -> None:
    """Make the page believe that its tab is hidden, or visible again."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{ configurable: true, get: () => {str(hidden).lower()} }})"
    )
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_the_root_address_redirects_to_the_first_page(tab: Tab) -> None:
    tab.answer(BusyBroker())
    tab.page.goto(tab.origin)
    expect(tab.page).to_have_url(f"{tab.origin}/dashboard/")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Punctual")
    expect(tab.page.get_by_role("navigation").get_by_role("link")).to_have_text(list(PAGES.values()))


def test_a_broker_out_of_reach_is_reported_and_the_figures_stay(
    tabs: Callable[..., Tab], tmp_path: Path
) -> None:
    with running_node(tmp_path / "data", http_port=0) as running:
        tab = tabs(running.node.http_port)
        tab.allowed = {0, 404}
        busy = BusyBroker()
        tab.answer(busy)
        page = tab.open("node")
        expect(page.get_by_text("timeball 0.1.0")).to_be_visible()
        page.unroute("**/v1/**")
        # As with a broker that does not run, no connection is made.
        page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
        expect(page.locator("#reach")).to_be_visible()
        expect(page.locator("#reach")).to_contain_text("Broker out of reach since")
        expect(page.get_by_text("timeball 0.1.0")).to_be_visible()
        page.unroute("**/v1/**")
        tab.answer(busy)
        page.get_by_role("button", name="Try now").click()
        expect(page.locator("#reach")).to_be_hidden()


def test_a_page_without_answers_makes_at_most_six_requests_in_the_first_minute_and_fewer_later(
    tab: Tab,
) -> None:
    tab.allowed = {0}
    requests: list[str] = []

    def refuse(route: Route) -> None:
        requests.append(route.request.url)
        route.abort("connectionrefused")

    page = tab.page
    page.clock.install()
    page.route("**/v1/**", refuse)
    tab.open("node")
    expect(page.locator("#reach")).to_be_visible()
    requests_by_minute = []
    for _ in range(4):
        before = len(requests)
        for _ in range(60):
            page.clock.run_for(1_000)
        requests_by_minute.append(len(requests) - before)
    # With answers, a request every two seconds would be thirty in a minute.
    assert requests_by_minute[0] <= 6 and 1 <= requests_by_minute[-1] <= 3


def test_a_hidden_tab_makes_no_requests_until_it_is_visible(tab: Tab) -> None:
    answers = CountingBroker()
    page = tab.page
    page.clock.install()
    tab.answer(answers)
    tab.open("groups")
    expect(page.locator("tbody tr").first).to_be_visible()
    hide(page, hidden=True)
    before = len(answers.requests)
    for _ in range(60):
        page.clock.run_for(1_000)
    assert len(answers.requests) == before
    hide(page, hidden=False)
    page.clock.run_for(1_000)
    page.wait_for_function("document.getElementById('live').dataset.state === 'live'")
    assert answers.count("/v1/groups") > 1


def test_an_update_keeps_the_rows_and_the_focus(tab: Tab) -> None:
    answers = CountingBroker()
    tab.answer(answers)
    page = tab.open("groups")
    link = page.get_by_role("link", name="7")
    link.focus()
    page.evaluate("document.querySelectorAll('tbody tr').forEach(row => { row.isKept = true; })")
    requests = answers.count("/v1/groups")
    with page.expect_response("**/v1/groups"):
        pass
    with page.expect_response("**/v1/groups"):
        pass
    assert answers.count("/v1/groups") > requests
    assert page.evaluate("[...document.querySelectorAll('tbody tr')].every(row => row.isKept)")
    expect(link).to_be_focused()


def test_an_account_without_admin_rights_has_no_buttons(tabs: Callable[..., Tab]) -> None:
    for may_admin in (True, False):
        tab = tabs()
        tab.answer(BusyBroker(may_admin=may_admin))
        for name, button in (
            ("waiting", "Cancel"),
            ("dead-letters", "All of this group"),
            ("campaigns", "Pause"),
            ("push", "Delete"),
            ("schedules", "Delete"),
            ("bulk", "Undo"),
        ):
            page = tab.open(name)
            expect(page.locator("tbody tr").first).to_be_visible()
            buttons = page.get_by_role("button", name=button)
            expect(buttons.first).to_be_visible() if may_admin else expect(buttons).to_have_count(0)


def test_an_account_signs_in_with_its_secret_and_out(tabs: Callable[..., Tab], guarded: RunningNode) -> None:
    tab = tabs(guarded.node.http_port)
    tab.allowed = {401, 403}
    page = tab.page
    page.goto(f"{tab.origin}/dashboard/#/node")
    expect(page.locator("h1")).to_have_text("Sign in")
    page.get_by_label("Access key").fill("root")
    page.get_by_label("Secret key").fill("not the secret")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Secret key").fill(SECRETS["root"])
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Node")
    expect(page.get_by_text("timeball 0.1.0")).to_be_visible()
    expect(page.locator("#account-name")).to_have_text("root")
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    expect(page.get_by_text("timeball 0.1.0")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("h1")).to_have_text("Sign in")
    assert page.evaluate("sessionStorage.length") == 0


def test_the_chosen_colours_survive_a_reload_and_auto_follows_the_system(tab: Tab) -> None:
    tab.answer(BusyBroker())
    page = tab.open("node")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_label("Dark").check(force=True)
    dark = page.evaluate(background)
    assert light != dark
    page.reload()
    expect(page.get_by_label("Dark")).to_be_checked()
    assert page.evaluate(background) == dark
    page.get_by_label("Auto").check(force=True)
    assert page.evaluate(background) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == dark


def test_a_page_can_be_used_by_the_keyboard_alone(tab: Tab) -> None:
    tab.answer(BusyBroker())
    page = tab.open("node")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("link", name="Coming").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    chart = page.get_by_role("group", name="Messages by when they are due")
    expect(page.locator(".marks rect").first).to_be_attached()
    chart.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator(".readout")).to_contain_text("due")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Due by the second")).to_be_visible()
    page.go_back()
    expect(page.get_by_text("Due by the minute")).to_be_visible()


def test_a_closed_dialog_returns_the_focus(tab: Tab) -> None:
    tab.answer(BusyBroker())
    page = tab.open("waiting")
    opener = page.get_by_role("button", name="Cancel").first
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("Cancel this message?")
    expect(page.get_by_role("button", name="Leave it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(opener).to_be_focused()


def test_a_phone_has_a_menu_that_closes_after_a_choice(tabs: Callable[..., Tab]) -> None:
    tab = tabs(viewport=PHONE)
    tab.answer(BusyBroker())
    page = tab.open("node")
    expect(page.get_by_role("navigation")).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    page.get_by_role("link", name="Groups").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Groups")
    expect(page.get_by_role("navigation")).to_be_hidden()
