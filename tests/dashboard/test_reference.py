"""The reference of the HTTP API: it shows every operation of openapi.json, and each of its curl commands works."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.accounts import guarded_node
from tests.bounds import BOUND_S
from tests.dashboard.browser import PHONE, Tab, needed, overflow
from tests.dashboard.test_pages import accessibility_faults
from tests.edges.http.client import Client
from tests.edges.http.handlers.test_campaigns import planned
from tests.edges.http.openapi import OPERATIONS
from tests.interop import environments
from tests.node_fixture import RunningNode

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]
# Operations that the broker of this test refuses, with the status. Its campaign was sent and not attached, so it cannot
# be cancelled as a whole. A single broker leads no group, belongs to no cluster, and has no manual clock. The selection
# of the examples does not exist, because the broker chooses the ids of selections.
REFUSED = {
    "cancel_campaign": 416,
    "leads": 404,
    "cluster": 404,
    "ask_group": 404,
    "clock": 404,
    "advance_clock": 404,
    "selection": 404,
    "undo_selection": 404,
}
ENDLESS = {"events", "stream"}
ORDER = ["put", "post", "get", "patch", "delete"]


def reference(tab: Tab, hash_: str = "") -> Page:
    """Open the reference, at an operation if `hash_` names one, and wait until it shows operations."""
    tab.page.goto(f"{tab.origin}/docs{hash_}")
    expect(tab.page.locator(".operation").first).to_be_visible()
    return tab.page


def visible_operations(page: Page) -> list[str]:
    """The ids of the visible operations, in the order of the page."""
    return [
        operation.get_attribute("id") or ""
        for operation in page.locator(".operations > section .operation:visible").all()
    ]


def test_each_operation_is_shown_with_its_parameters_and_answers(tab: Tab, client: Client) -> None:
    page = reference(tab)
    expect(page).to_have_url(f"{tab.origin}/dashboard/reference.html")
    assert sorted(visible_operations(page)) == sorted(operation.name for operation in OPERATIONS)
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(len(OPERATIONS))
    page.get_by_role("button", name="Open all").click()
    document = client.ask("GET", "/openapi.json").value
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = page.locator(f"#{operation['operationId']}").inner_text()
            for part in (path, method.upper(), operation["summary"], "curl -s"):
                assert part in text, operation["operationId"]
            for parameter in operation["parameters"]:
                assert parameter["name"] in text
                assert parameter.get("description", "").split("`")[0] in text
            for status in operation["responses"].keys() - {"default"}:
                assert f"{status} " in text
    send = page.locator("#send")
    for part in (
        "at",
        "integer or string",
        "application/x-ndjson",
        "Idempotency-Key",
        "list of Message",
    ):
        expect(send).to_contain_text(part)
    # The fields of a struct within a struct are inserted when it is opened.
    send.locator("summary", has_text="Sent").last.click()
    expect(send.locator(".inner[open]")).to_contain_text("durable")


def test_a_search_finds_operations_by_words_and_by_fields(tab: Tab) -> None:
    page = reference(tab)
    page.keyboard.press("/")
    expect(page.get_by_label("Search")).to_be_focused()
    page.keyboard.type("subscriptions PUT")
    expect(page.locator(".operations > section .operation:visible")).to_have_count(1)
    assert visible_operations(page) == ["subscribe"]
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(1)
    # A field of a body is found too.
    page.get_by_label("Search").fill("idempotency")
    expect(page.get_by_text("1 of ")).to_be_visible()
    assert visible_operations(page) == ["send"]
    page.get_by_label("Search").fill("<img src=x onerror=alert(1)>")
    expect(page.get_by_text("No operation has all of these words.")).to_be_visible()
    page.get_by_label("Search").fill("")
    expect(page.locator(".operation:visible")).to_have_count(len(OPERATIONS) + 1)


def test_the_reference_can_be_used_by_the_keyboard_alone(tab: Tab) -> None:
    page = reference(tab)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    summary = page.locator("#subscribe > summary")
    summary.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#subscribe")).to_have_attribute("open", "")
    page.keyboard.press("Enter")
    expect(page.locator("#subscribe")).not_to_have_attribute("open", "")


def test_an_address_with_a_fragment_opens_its_operation(tab: Tab) -> None:
    page = reference(tab, "#nack")
    expect(page.locator("#nack")).to_have_attribute("open", "")
    expect(page.locator("#nack > summary")).to_be_focused()
    page.get_by_label("Search").fill("campaign")
    page.evaluate("location.hash = '#forecast'")
    expect(page.locator("#forecast")).to_have_attribute("open", "")
    expect(page.locator("#forecast")).to_be_visible()
    page.evaluate("location.hash = '#%'")
    expect(page.locator("#forecast")).to_be_visible()


def test_the_reference_and_the_dashboard_are_linked(tab: Tab) -> None:
    page = tab.open("node")
    page.get_by_role("link", name="HTTP API").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("HTTP API")
    page.get_by_role("link", name="Dashboard").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Punctual")


def test_the_reference_is_shown_without_an_account(tabs: Callable[..., Tab], tmp_path: Path) -> None:
    with guarded_node(tmp_path, http_port=0) as node:
        assert len(visible_operations(reference(tabs(node.node.http_port)))) == len(OPERATIONS)


@pytest.mark.parametrize("colours", ["light", "dark", "phone"])
def test_the_reference_is_accessible(tabs: Callable[..., Tab], axe: str, colours: str) -> None:
    options: dict[str, Any] = {"viewport": PHONE} if colours == "phone" else {"color_scheme": colours}
    tab = tabs(**options)
    page = reference(tab, "#send")
    tab.shoot(f"reference-{colours}")
    page.get_by_role("button", name="Open all").click()
    for summary in page.locator("#send .inner > summary, #groups .inner > summary").all():
        summary.click()
    assert overflow(page) <= 0
    assert not accessibility_faults(page, axe)


def test_a_document_that_cannot_be_read_is_reported(tab: Tab) -> None:
    tab.allowed = {503}
    tab.page.route("**/openapi.json", lambda route: route.fulfill(status=503, json={"detail": "disk full"}))
    tab.page.goto(f"{tab.origin}/docs")
    expect(tab.page.locator("#about")).to_contain_text("could not be read: disk full")


def test_each_curl_command_has_the_status_of_its_operation(
    tab: Tab, client: Client, node: RunningNode
) -> None:
    """The commands run in an order in which each finds the objects that it needs. REFUSED has the exceptions."""
    needed(lambda: environments.tool("curl", "curl"))
    page = reference(tab)
    planned(node, "spring", client)
    commands = {
        (command.get_attribute("aria-label") or "").removeprefix("curl for "): command.text_content() or ""
        for command in page.locator("pre.body").all()
    }
    order = sorted(OPERATIONS, key=lambda operation: ORDER.index(operation.method))
    statuses: dict[str, int] = {}
    for operation in order:
        if operation.name in ENDLESS:
            continue
        if operation.name == "get":
            client.send("orders", {"body": "x", "id": "order-17", "after": "1h"})
        # A shell runs the command, as a user would.
        command = f"{commands[operation.name]} -o /dev/null -w '%{{http_code}}'"
        assert command.startswith("curl ")
        process = subprocess.run(
            ["sh", "-c", command], capture_output=True, text=True, timeout=BOUND_S, check=True
        )
        statuses[operation.name] = int(process.stdout)
    assert {name: status for name, status in statuses.items() if status >= 300} == REFUSED


def test_a_document_without_an_operation_fails_the_comparison(tab: Tab, client: Client) -> None:
    document = client.ask("GET", "/openapi.json").value
    del document["paths"]["/v1/jobs"]
    tab.page.route("**/openapi.json", lambda route: route.fulfill(json=document))
    assert sorted(visible_operations(reference(tab))) != sorted(operation.name for operation in OPERATIONS)
