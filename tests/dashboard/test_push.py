"""The page of push subscriptions with a real broker and a real receiver."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from standardwebhooks.webhooks import Webhook
from tests.accounts import SECRETS, guarded_node
from tests.dashboard.browser import Tab, overflow
from tests.edges.http.client import Client, client_of
from tests.edges.http.handlers.test_groups import given_up
from tests.edges.push.receiver import Receiver, Reply, receiver_of
from tests.node_fixture import RunningNode, eventually

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]
PATH = "/v1/subscriptions"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiver_of() as running:
        yield running


@pytest.fixture(autouse=True)
def none_left(client: Client) -> Iterator[None]:
    """Delete all subscriptions after a test."""
    yield
    for subscription in client.ask("GET", PATH).value["subscriptions"]:
        client.ask("DELETE", f"{PATH}/{subscription['name']}")


def create_subscription(client: Client, name: str, receiver: Receiver, **fields: Any) -> dict[str, Any]:
    """Create a subscription to `for-NAME`. Returns the answer of the broker, which has the secret."""
    request = {"topic": f"for-{name}", "group": name, "url": receiver.url, **fields}
    answer = client.ask("PUT", f"{PATH}/{name}", request)
    assert answer.status == 201, answer
    return dict(answer.value)


def row_of(page: Page, name: str) -> Locator:
    """The row of a table with this text."""
    return page.locator("tbody tr").filter(has_text=name)


def cell(row: Locator, label: str) -> Locator:
    """The cell of a row in the column with this heading."""
    return row.locator(f'td[data-label="{label}"]')


def act(page: Page, opener: Locator, label: str, status_text: str) -> None:
    """Click a button, confirm its dialog by the button `label`, expect the text of its status, and close it."""
    opener.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=label).click()
    expect(dialog.get_by_role("status")).to_have_text(status_text)
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def test_a_subscription_is_created_and_its_secret_is_shown_once(
    tab: Tab, client: Client, receiver: Receiver
) -> None:
    tab.allowed = {400}
    page = tab.open("push")
    expect(page.get_by_text("No push subscriptions.")).to_be_visible()
    page.get_by_role("button", name="New subscription").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Make it").click()
    expect(dialog.get_by_role("status")).to_have_text("Give it a name.")
    for label, text in (
        ("Name", "billing"),
        ("Topic", "for-billing"),
        ("Group", "billing"),
        ("Timeout", "5s"),
    ):
        dialog.get_by_label(label, exact=True).fill(text)
    dialog.get_by_label("URL").fill("http://169.254.169.254/latest")
    dialog.get_by_role("button", name="Make it").click()
    expect(dialog.get_by_role("status")).to_contain_text("invalid_message")
    dialog.get_by_label("URL").fill(receiver.url)
    dialog.get_by_role("button", name="Make it").click()
    secret = dialog.get_by_label("Secret that signs the requests")
    expect(secret).to_have_value(re.compile("whsec_.{40}"))
    secret_text = secret.input_value()
    # A click outside the dialog does not lose a secret that is secret_text only once.
    page.mouse.click(2, 2)
    expect(secret).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    # Find it by its element: a closed dialog has no role any more, and is removed a little later.
    expect(page.locator("dialog")).to_have_count(0)
    assert "whsec_" not in page.content()
    assert client.send("for-billing", [{"body": "x"}] * 3).status == 201
    row = row_of(page, "billing")
    expect(cell(row, "Delivered")).to_have_text("3")
    expect(cell(row, "Failed")).to_have_text("0")
    expect(row.locator(".state")).to_have_text("delivering")
    stored = client.ask("GET", f"{PATH}/billing").value
    assert (stored["timeout"], stored["url"], stored["delivered"]) == ("5s", receiver.url, 3)
    for request in receiver.requests:
        Webhook(secret_text).verify(request.body, request.headers, json_parse=False)


def test_a_subscription_with_an_existing_name_is_refused(
    tab: Tab, client: Client, receiver: Receiver
) -> None:
    create_subscription(client, "taken", receiver)
    page = tab.open("push")
    expect(row_of(page, "taken")).to_be_visible()
    page.get_by_role("button", name="New subscription").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("taken")
    dialog.get_by_label("URL").fill("https://elsewhere.example/")
    dialog.get_by_role("button", name="Make it").click()
    expect(dialog.get_by_role("status")).to_contain_text("There is a subscription of this name")
    assert client.ask("GET", f"{PATH}/taken").value["url"] == receiver.url


def test_a_failing_receiver_is_shown_and_tried_again_on_request(
    tab: Tab, client: Client, receiver: Receiver
) -> None:
    receiver.script = lambda request: Reply(500)
    create_subscription(client, "mailers", receiver)
    page = tab.open("push")
    row = row_of(page, "mailers")
    expect(row).to_contain_text("circuit closed")
    expect(row.get_by_role("button", name="Try now")).to_be_hidden()
    # Ten failures in a row open the circuit.
    assert client.send("for-mailers", [{"body": "x"}] * 16).status == 201
    expect(row.locator(".state")).to_have_text("failing")
    expect(row).to_contain_text("circuit open")
    expect(cell(row, "Failed")).to_have_text(re.compile("1[0-9]"))
    expect(row).to_contain_text(re.compile("last failure: server_error.*in a row"))
    receiver.script = lambda request: Reply(204)
    assert client.send("for-mailers", {"body": "fresh"}).status == 201
    act(page, row.get_by_role("button", name="Try now"), "Try now", "It is tried now.")
    expect(row.locator(".state")).to_have_text("delivering")
    eventually(lambda: b"fresh" in receiver.bodies(), "the message after the failures is pushed")


def test_a_subscription_is_paused_and_resumed(tab: Tab, client: Client, receiver: Receiver) -> None:
    create_subscription(client, "search", receiver)
    page = tab.open("push")
    row = row_of(page, "search")
    act(page, row.get_by_role("button", name="Pause"), "Pause", "Paused: nothing more is sent.")
    expect(row.locator(".state")).to_have_text("paused")
    assert client.ask("GET", f"{PATH}/search").value["state"] == "paused"
    assert client.send("for-search", {"body": "kept"}).status == 201
    expect(row.get_by_role("button", name="Pause")).to_be_hidden()
    assert receiver.requests == []
    act(page, row.get_by_role("button", name="Resume"), "Resume", "Resumed: it goes on at once.")
    expect(cell(row, "Delivered")).to_have_text("1")
    assert receiver.bodies() == [b"kept"]


def test_a_change_of_a_subscription_keeps_the_other_fields(
    tab: Tab, client: Client, receiver: Receiver
) -> None:
    tab.allowed = {400, 416}
    first = create_subscription(
        client, "changed", receiver, filter="red || blue", rate_per_s=2.5, timeout="1500ms"
    )
    page = tab.open("push")
    row = row_of(page, "changed")
    row.get_by_role("button", name="Change").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Filter", exact=True)).to_have_value("red || blue")
    dialog.get_by_label("In flight at most").fill("0")
    dialog.get_by_role("button", name="Change it").click()
    expect(dialog.get_by_role("status")).to_contain_text("out_of_range")
    dialog.get_by_label("In flight at most").fill("3")
    dialog.get_by_label("Secret").select_option("true")
    dialog.get_by_role("button", name="Change it").click()
    secret = dialog.get_by_label("Secret that signs the requests")
    expect(secret).to_have_value(re.compile("whsec_"))
    assert secret.input_value() != first["secret"]
    dialog.get_by_role("button", name="Close").click()
    expect(cell(row, "In flight")).to_have_text("0 of 3")
    stored = client.ask("GET", f"{PATH}/changed").value
    untouched = {"topic", "group", "url", "filter", "filter_type", "rate_per_s", "timeout"}
    assert {name: stored[name] for name in untouched} == {name: first[name] for name in untouched}


def test_a_subscription_is_deleted_after_a_confirmation(tab: Tab, client: Client, receiver: Receiver) -> None:
    create_subscription(client, "deleted", receiver)
    page = tab.open("push")
    row = row_of(page, "deleted")
    row.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(receiver.url)
    dialog.get_by_role("button", name="Leave it").click()
    assert client.ask("GET", f"{PATH}/deleted").status == 200
    act(page, row.get_by_role("button", name="Delete"), "Delete the subscription", "Deleted.")
    expect(page.get_by_text("No push subscriptions.")).to_be_visible()
    assert client.ask("GET", f"{PATH}/deleted").status == 404


def test_the_dead_letters_of_a_subscription_are_counted_and_linked(
    tab: Tab, client: Client, node: RunningNode, receiver: Receiver
) -> None:
    given_up(node, client, "for-dead", "dead", {"body": "a"}, {"body": "b"})
    create_subscription(client, "dead", receiver)
    page = tab.open("push")
    link = cell(row_of(page, "dead"), "Dead letters").get_by_role("link")
    expect(link).to_have_text("2")
    link.click()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_urls_and_names_of_subscriptions_are_shown_as_text(
    tab: Tab, client: Client, receiver: Receiver
) -> None:
    # The broker allows these texts. Answers with others are tested in test_pages.py.
    url = f"{receiver.url}/onerror=alert(1)//%3Cimg%3E?javascript:alert(2)'--"
    create_subscription(client, "hostile", receiver, url=url, group="%script|img%")
    page = tab.open("push")
    row = row_of(page, "hostile")
    expect(row).to_contain_text("javascript:alert(2)")
    # Any account may set the address, so it is shown as text, and never as a link.
    assert row.get_by_role("link").count() == 1
    row.get_by_role("button", name="Change").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    row.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("dialog")).to_contain_text("javascript:alert(2)")
    page.keyboard.press("Escape")
    expect(page.locator("#page img, #page script, dialog")).to_have_count(0)
    assert overflow(page) <= 0
    act(page, row.get_by_role("button", name="Delete"), "Delete the subscription", "Deleted.")


def test_an_account_without_admin_rights_has_its_subscriptions_and_no_buttons(
    tabs: Callable[..., Tab], tmp_path: Path, receiver: Receiver
) -> None:
    with guarded_node(tmp_path, http_port=0, push_allow="127.0.0.1") as guarded:
        with client_of(guarded, f"Bearer root:{SECRETS['root']}") as root:
            create_subscription(root, "own", receiver, topic="orders", group="workers")
            create_subscription(root, "foreign", receiver, topic="news", group="readers")
        for account, rows in (("shop", ["own"]), ("root", ["foreign", "own"])):
            tab = tabs(guarded.node.http_port)
            tab.allowed = {401, 403}
            page = tab.page
            page.goto(f"{tab.origin}/dashboard/#/push")
            page.get_by_label("Access key").fill(account)
            page.get_by_label("Secret key").fill(SECRETS[account])
            page.keyboard.press("Enter")
            expect(page.locator("h1")).to_have_text("Push")
            expect(page.locator("tbody tr td:first-child bdi.mono:first-child")).to_have_text(rows)
            expect(page.locator("#page button:visible")).to_have_count(0 if account == "shop" else 7)
