"""Actions on the pages with a real broker: the page shows the verdict of the broker."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.answers import HOSTILE
from tests.dashboard.browser import Tab, overflow
from tests.edges.http.client import Client
from tests.edges.http.handlers.test_campaigns import planned
from tests.edges.http.handlers.test_groups import given_up
from tests.node_fixture import RunningNode

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]


def schedule_message(client: Client, topic: str, **message: Any) -> dict[str, Any]:
    """Send a message that is due in an hour. Returns the answer of the broker."""
    answer = client.send(topic, {"body": "x", "after": "1h", **message})
    assert answer.status == 201, answer
    return dict(answer.value)


def find_message(client: Client, message_id: str) -> dict[str, Any]:
    """Return the state of a message at the broker."""
    messages = client.ask("GET", f"/v1/messages/{quote(message_id, safe='')}").value["messages"]
    return dict(messages[0])


def search_by(tab: Tab, how: str, text: str) -> Page:
    """Open the page Waiting, and search there for a text that one message has. `how` is the label of the search."""
    page = tab.open("waiting")
    page.get_by_label("Find by").select_option(label=how)
    page.get_by_label("Text").fill(text)
    page.get_by_role("button", name="Search").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    return page


def test_a_message_is_found_by_its_key_and_cancelled(tab: Tab, client: Client) -> None:
    sent = schedule_message(client, "cancels", key="order-17")
    schedule_message(client, "cancels", key="order-18")
    page = search_by(tab, "Key", "order-17")
    page.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("order-17")
    dialog.get_by_role("button", name="Cancel the message").click()
    expect(dialog.get_by_role("status")).to_have_text("Cancelled: it will not be delivered.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_text("Nothing waits here.")).to_be_visible()
    assert find_message(client, sent["id"])["state"] == "cancelled"


def test_a_message_is_found_by_its_id_and_rescheduled_after_wrong_inputs(tab: Tab, client: Client) -> None:
    sent = schedule_message(client, "moves", id="moved-1")
    tab.allowed = {400}
    page = search_by(tab, "Message id", "moved-1")
    page.get_by_role("button", name="Reschedule").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Move it").click()
    expect(dialog.get_by_role("status")).to_have_text("Fill in one of the two.")
    dialog.get_by_label("Or after").fill("soon")
    dialog.get_by_role("button", name="Move it").click()
    expect(dialog.get_by_role("status")).to_contain_text("invalid_delay")
    dialog.get_by_label("Or after").fill("3h")
    dialog.get_by_role("button", name="Move it").click()
    expect(dialog.get_by_role("status")).to_contain_text("Moved: it is due")
    moved = find_message(client, "moved-1")
    assert moved["state"] == "waiting" and moved["due_ms"] > sent["due_ms"] + 3_600_000


def test_a_due_time_is_entered_in_the_time_zone_of_the_browser(tab: Tab, client: Client) -> None:
    schedule_message(client, "moves", id="moved-2")
    page = search_by(tab, "Message id", "moved-2")
    page.get_by_role("button", name="Reschedule").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("In Europe/Berlin.")
    dialog.get_by_label("At", exact=True).fill("2030-07-01T12:00:00")
    dialog.get_by_role("button", name="Move it").click()
    expect(dialog.get_by_role("status")).to_contain_text("1 Jul 2030, 12:00:00")
    assert find_message(client, "moved-2")["due"] == "2030-07-01T10:00:00.000Z"


@pytest.mark.parametrize(("verb", "label"), [("Cancel", "Cancel the message"), ("Reschedule", "Move it")])
def test_the_verdict_for_a_message_that_was_cancelled_meanwhile_is_shown(
    tab: Tab, client: Client, verb: str, label: str
) -> None:
    tab.allowed = {409}
    sent = schedule_message(client, "late", key=f"late-{verb}")
    page = search_by(tab, "Key", f"late-{verb}")
    page.get_by_role("button", name=verb).click()
    dialog = page.get_by_role("dialog")
    assert client.ask("DELETE", f"/v1/messages/{sent['id']}").status == 200
    if verb == "Reschedule":
        dialog.get_by_label("Or after").fill("3h")
    dialog.get_by_role("button", name=label).click()
    expect(dialog.get_by_role("status")).to_contain_text("already_cancelled")


def test_pending_messages_are_listed_in_pages_by_due_time(tab: Tab, client: Client) -> None:
    messages = [{"body": "x", "after": f"{2 + number}h", "key": f"listed-{number}"} for number in range(60)]
    assert client.send("listed", messages).status == 201
    page = tab.open("waiting", topic="listed")
    expect(page.locator("tbody tr")).to_have_count(50)
    expect(page.locator("tbody tr").first).to_contain_text("listed-0")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("tbody tr")).to_have_count(10)
    expect(page.get_by_text("page 2")).to_be_visible()
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("tbody tr")).to_have_count(50)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_label("Topic")).to_have_value("")


def test_html_in_messages_of_a_real_broker_is_shown_as_text(tab: Tab, client: Client) -> None:
    # The broker allows neither blanks nor unprintable characters in an id or a key.
    printable = "".join(letter for letter in HOSTILE if letter.isprintable() and letter != " ")
    for number, body in enumerate(
        (
            {"body": HOSTILE},
            {"base64": base64.b64encode(bytes(range(256))).decode()},
            {"body": "b" * (4 << 20)},
        )
    ):
        sent = client.send(
            "hostile",
            {"after": "1h", "id": f"{printable}{number}", "key": f"key-{number}-{printable}", **body},
        )
        assert sent.status == 201, sent
    page = tab.open("waiting", topic="hostile")
    expect(page.locator("tbody tr")).to_have_count(3)
    for row in range(3):
        page.locator("tbody button.link").nth(row).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("<script>")
        assert dialog.locator("img, script").count() == 0
        page.keyboard.press("Escape")
    assert overflow(page) <= 0
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("button", name="Cancel the message").click()
    expect(page.get_by_role("dialog").get_by_role("status")).to_contain_text("Cancelled")


def test_the_page_punctual_shows_new_releases(tab: Tab, client: Client) -> None:
    page = tab.open("punctual")
    expect(page.get_by_text("Nothing has been released")).to_be_visible()
    sent = client.send("punctual", [{"body": "x", "after": "1ms"} for _ in range(20)])
    assert sent.status == 201
    expect(page.get_by_text("20 since the start")).to_be_visible()
    expect(page.get_by_text("Nothing has been released")).to_be_hidden()
    expect(page.locator(".bar-list tr").first).to_be_visible()


def test_the_page_node_shows_the_version_and_the_process_id(
    tabs: Callable[..., Tab], node: RunningNode
) -> None:
    page = tabs().open("node")
    expect(page.get_by_text("timeball 0.1.0")).to_be_visible()
    expect(page.get_by_text(str(node.node.status()["pid"]))).to_be_visible()


def test_dead_letters_are_shown_resent_and_deleted(tab: Tab, client: Client, node: RunningNode) -> None:
    given_up(
        node,
        client,
        "letters",
        "billing",
        *({"body": HOSTILE, "key": f"dead-{number}"} for number in range(4)),
    )
    page = tab.open("groups")
    page.get_by_role("link", name="4").click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(4)
    rows.first.locator("button.link").click()
    expect(page.get_by_role("dialog")).to_contain_text("<script>")
    page.keyboard.press("Escape")
    dialog = page.get_by_role("dialog")
    for verb, label, status_text, remaining in (
        ("Send 1 again", "Send again", "1 sent again.", 3),
        ("Delete 1", "Delete", "1 deleted.", 2),
    ):
        rows.first.get_by_role("checkbox").check()
        page.get_by_role("button", name=verb).click()
        dialog.get_by_role("button", name=label).click()
        expect(dialog.get_by_role("status")).to_have_text(status_text)
        dialog.get_by_role("button", name="Close").click()
        expect(rows).to_have_count(remaining)
    page.get_by_role("button", name="All of this group").click()
    dialog.get_by_label("What to do").select_option("delete")
    dialog.get_by_role("button", name="Do it").click()
    expect(dialog.get_by_role("status")).to_have_text("2 deleted.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    assert len(client.receive("letters", "billing").value["messages"]) == 1


def test_no_action_on_dead_letters_is_offered_before_their_group_is_known(tab: Tab) -> None:
    tab.page.route("**/v1/groups", lambda route: None)  # never answered
    page = tab.open("dead-letters")
    expect(page.get_by_label("Group")).to_be_visible()
    expect(page.get_by_role("button", name="All of this group")).to_be_hidden()


def test_a_received_message_shows_its_lease_and_its_attempts(tab: Tab, client: Client) -> None:
    assert client.send("followed", {"id": "followed-1", "body": "x"}).status == 201
    (received,) = client.receive("followed", "billing").value["messages"]
    nack = {"receipts": [received["receipt"]], "after": "1s"}
    client.ask("POST", "/v1/topics/followed/nack", nack, query={"group": "billing"})
    (received,) = client.receive("followed", "billing").value["messages"]
    page = search_by(tab, "Message id", "followed-1")
    page.locator("tbody button.link").click()
    facts = page.get_by_role("dialog").locator("dl").first
    expect(facts).to_contain_text("Group billingleased until")
    expect(facts).to_contain_text("handed out 2 times")
    page = tab.open("groups")
    expect(page.locator("tbody tr", has_text="billing")).to_contain_text("followed, to be tried again")


def test_campaigns_are_paused_resumed_and_cancelled(tab: Tab, client: Client, node: RunningNode) -> None:
    planned(node, "spring", client)
    planned(node, "autumn")
    page = tab.open("campaigns")
    for name, verb, label, status_text in (
        ("spring", "Pause", "Pause", "Paused: what waits is held."),
        ("spring", "Resume", "Resume", "Resumed."),
        ("autumn", "Cancel", "Cancel the campaign", "Cancelled: 0 messages will not be delivered."),
    ):
        row = page.locator("tbody tr").filter(has_text=name)
        row.get_by_role("button", name=verb).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text(name)
        dialog.get_by_role("button", name=label).click()
        expect(dialog.get_by_role("status")).to_have_text(status_text)
        dialog.get_by_role("button", name="Close").click()
        expect(row.locator(".state")).to_have_text(node.broker.campaigns(name)[0].state)
    expect(row.get_by_role("button")).to_have_count(0)
    assert node.broker.campaigns("autumn")[0].state == "cancelled"


def test_the_page_coming_counts_due_messages_and_zooms_into_a_peak(tab: Tab, client: Client) -> None:
    # On this day no other test has messages.
    due = datetime(2031, 1, 31, 9, 30, tzinfo=UTC)
    at_the_peak = [{"body": "x", "at": due.isoformat()} for _ in range(30)]
    five_hours_later = [
        {"body": "x", "at": (due + timedelta(hours=5, seconds=7)).isoformat()} for _ in range(7)
    ]
    assert client.send("coming", at_the_peak + five_hours_later).status == 201
    midnight = round(due.replace(hour=0, minute=0).timestamp() * 1_000)
    page = tab.open("coming", by="hour", n="24", **{"from": str(midnight)})
    expect(page.locator(".tile-value").first).to_have_text("37")
    expect(page.locator(".bar-list tr")).to_have_count(1)
    expect(page.locator(".bar-list tr")).to_contain_text("coming")
    peaks = page.locator(".peaks li")
    expect(peaks).to_have_count(2)
    expect(peaks.first).to_contain_text("10:00, 31 Jan")
    peaks.first.get_by_role("button").click()
    expect(page.get_by_text("Due by the minute")).to_be_visible()
    expect(page.locator(".tile-value").first).to_have_text("30")
    page.get_by_role("button", name="Zoom out").click()
    expect(page.get_by_text("Due by the hour")).to_be_visible()
    page.get_by_label("Topic").select_option("coming")
    expect(page).to_have_url(re.compile("topic=coming"))
    page.get_by_role("button", name="Minute").click()
    expect(page.get_by_text("Nothing is due in this window.")).to_be_visible()
