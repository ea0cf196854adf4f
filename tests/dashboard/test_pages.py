"""Each page in a real browser: no faults of console or policy, no overflow, accessible, HTML in texts shown as text.

Pictures of all pages go to `.interop/dashboard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.answers import HOSTILE, BusyBroker
from tests.dashboard.browser import PAGES, PHONE, Tab, overflow

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]
GRAVE = {"serious", "critical"}


def accessibility_faults(page: Page, axe: str) -> list[str]:
    """The serious accessibility faults that axe-core finds, and their places."""
    page.evaluate(axe)
    violations: list[dict[str, Any]] = page.evaluate("axe.run().then(result => result.violations)")
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:200]}"
        for violation in violations
        if violation["impact"] in GRAVE
        for node in violation["nodes"]
    ]


def wait_until_shown(page: Page) -> None:
    """Wait until the page has made its requests and got the answers."""
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible(tabs: Callable[..., Tab], axe: str, name: str, colours: str) -> None:
    tab = tabs(color_scheme=colours)
    tab.answer(BusyBroker())
    page = tab.open(name)
    wait_until_shown(page)
    tab.shoot(f"{name}-{colours}")
    assert not accessibility_faults(page, axe)


def test_the_check_for_accessibility_finds_a_missing_label_and_a_pale_text(tab: Tab, axe: str) -> None:
    tab.answer(BusyBroker())
    page = tab.open("waiting")
    wait_until_shown(page)
    page.evaluate("document.querySelector('label[for=text]').remove()")
    page.evaluate("document.documentElement.style.setProperty('--soft', '#d8d8d8')")
    faults = "\n".join(accessibility_faults(page, axe))
    assert "label (critical)" in faults and "color-contrast (serious)" in faults


def test_pages_of_an_empty_broker_show_no_error_and_are_accessible(
    tabs: Callable[..., Tab], axe: str
) -> None:
    for name in PAGES:
        tab = tabs()
        page = tab.open(name)
        wait_until_shown(page)
        tab.shoot(f"{name}-empty")
        expect(page.locator("#reach")).to_be_hidden()
        expect(page.locator("#page > .verdict:visible")).to_have_count(0)
        assert not accessibility_faults(page, axe)


def test_pages_fit_a_phone_and_are_accessible(tabs: Callable[..., Tab], axe: str) -> None:
    tab = tabs(viewport=PHONE, has_touch=True)
    tab.answer(BusyBroker(texts="a-key-that-is-rather-long-and-has-no-blank-to-break-at-" * 3))
    for name in PAGES:
        page = tab.open(name)
        wait_until_shown(page)
        tab.shoot(f"{name}-phone")
        assert overflow(page) <= 0, name
        assert not accessibility_faults(page, axe)


@pytest.mark.parametrize(
    "body", [HOSTILE + "<b>" * 21_000, "\r\n\t" * 100, ""], ids=["html", "blanks", "none"]
)
def test_html_in_texts_is_shown_as_text(tab: Tab, body: str) -> None:
    message = {"body": body, "body_cut": len(body) > 60_000, "size_bytes": 4 << 20}
    tab.answer(BusyBroker(texts=HOSTILE, body=message))
    for name in PAGES:
        page = tab.open(name)
        wait_until_shown(page)
        if name in ("waiting", "dead-letters"):
            page.locator("tbody button.link").first.click()
            expect(page.locator("dialog")).to_be_visible()
            assert page.locator("dialog img, dialog script").count() == 0
            page.keyboard.press("Escape")
            expect(page.locator("dialog")).to_have_count(0)
        assert page.locator("#page img, #page script").count() == 0
        assert overflow(page) <= 0, name
        text = page.locator("#page").inner_text()
        assert "\u202e" not in text and "\x1b" not in text


def test_the_browser_reports_violations_of_the_policy_and_errors_of_a_page(browser: Any, node: Any) -> None:
    tab = Tab(browser, node.node.http_port)
    tab.answer(BusyBroker())
    page = tab.open("node")
    for fault in ("innerHTML = '<img src=x onerror=alert(1)>'", "innerHTML = '<p style=color:red>x</p>'"):
        page.evaluate(f"document.getElementById('page').{fault}")
    page.evaluate("void fetch('http://127.0.0.1:1/').catch(() => {})")
    page.evaluate("void Promise.reject(new Error('of the page'))")
    page.wait_for_timeout(0)
    expect(page.locator("h1")).to_be_visible()
    faults = "\n".join(tab.faults)
    tab.close()
    for part in ("policy: script-src", "policy: style-src", "policy: connect-src", "of the page"):
        assert part in faults
