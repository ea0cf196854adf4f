"""The page of bulk operations with a real broker: dry runs, operations and undo."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.dashboard.browser import Tab
from tests.dashboard.test_actions import find_message, schedule_message
from tests.dashboard.test_push import act
from tests.edges.http.client import Client
from tests.node_fixture import eventually

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]


def send_for_region(client: Client, topic: str, region: str) -> str:
    """Send a message that is due in an hour, with a region as its key and property. Returns its id."""
    return str(schedule_message(client, topic, key=region, properties={"region": region})["id"])


def open_dry_run(tab: Tab, topic: str, where: str) -> Page:
    """Fill in a topic and a condition, and start a dry run. Does not wait for its result."""
    page = tab.open("bulk")
    page.get_by_label("Topics").fill(topic)
    page.get_by_label("Condition").fill(where)
    page.get_by_role("button", name="Dry run").click()
    return page


def test_selected_messages_are_counted_cancelled_and_restored_by_undo(tab: Tab, client: Client) -> None:
    eu, us = (send_for_region(client, "regions", region) for region in ("eu", "us"))
    page = tab.open("bulk")
    expect(page.get_by_text("No bulk operations.")).to_be_visible()
    apply = page.get_by_role("button", name="Apply")
    expect(apply).to_be_disabled()
    page = open_dry_run(tab, "regions", "region = 'eu'")
    expect(page.get_by_role("status").get_by_text("1 message would be covered now.")).to_be_visible()
    expect(page.locator("form .facts").last).to_contain_text(eu)
    expect(page.locator("form .bar-list td.number")).to_have_text("2 → 1")
    assert find_message(client, eu)["state"] == "waiting"
    apply.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Cancel 1 message?")
    expect(dialog).to_contain_text("topic regions; region = 'eu'")
    dialog.get_by_role("button", name="Cancel them").click()
    expect(dialog.get_by_role("status")).to_contain_text("Cancelled: operation")
    dialog.get_by_role("button", name="Close").click()
    expect(apply).to_be_disabled()
    row = page.locator("tbody tr", has_text="topic regions")
    expect(row.locator(".state")).to_have_text("active")
    expect(row.locator("td.number")).to_have_text("1")
    assert (find_message(client, eu)["state"], find_message(client, us)["state"]) == ("cancelled", "waiting")
    act(page, row.get_by_role("button", name="Undo"), "Undo it", "Undone.")
    expect(row.locator(".state")).to_have_text("undone")
    expect(row.get_by_role("button")).to_have_count(0)
    assert find_message(client, eu)["state"] == "waiting"


@pytest.mark.parametrize(
    # The label of the operation, its fields, its description in the dialog and in the list, and the fields of the
    # message that it changes: a due time by a difference, `{}` stands for the id of the operation.
    ("label", "fields", "descriptions", "changes"),
    [
        ("Shift", {"Shift by": "-30m"}, ("Shift by -30m", "Shift by \u221230 min"), {"due_ms": -1_800_000}),
        ("Pause", {}, ("Pause", "Pause"), {"reason": "paused by selection {}"}),
        ("Resume", {}, ("Resume", "Resume"), {}),
        ("Release", {}, ("Release", "Release"), {"state": "visible"}),
        ("Move", {"To topic": "other-regions"}, ("Move to other-regions",) * 2, {"topic": "other-regions"}),
    ],
)
def test_each_operation_is_applied_with_its_own_fields_after_a_dry_run(
    tab: Tab,
    client: Client,
    label: str,
    fields: dict[str, str],
    descriptions: tuple[str, str],
    changes: dict[str, Any],
) -> None:
    topic = f"all-{label.lower()}"
    message_id = send_for_region(client, topic, "eu")
    if label == "Resume":
        client.ask("POST", "/v1/selections", {"action": "pause", "topics": [topic]})
    before = find_message(client, message_id)
    page = tab.open("bulk")
    page.get_by_label("Operation").select_option(label)
    page.get_by_label("Topics").fill(topic)
    for name, value in fields.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_text("1 message would be covered now.")).to_be_visible()
    assert find_message(client, message_id) == before
    apply = page.get_by_role("button", name="Apply")
    if fields:  # a changed field needs another dry run
        page.get_by_label(next(iter(fields)), exact=True).press_sequentially(" ")
        expect(apply).to_be_disabled()
        page.get_by_role("button", name="Dry run").click()
    apply.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(descriptions[0])
    dialog.get_by_role("button", name=f"{label} them").click()
    expect(dialog.get_by_role("status")).to_contain_text(": operation ")
    dialog.get_by_role("button", name="Close").click()
    row = page.locator("tbody tr", has_text=f"topic {topic}").first
    expect(row).to_contain_text(descriptions[1])
    selection = client.ask("GET", "/v1/selections").value["selections"][-1]["id"]
    expected = {
        name: before["due_ms"] + value if name == "due_ms" else value.format(selection)
        for name, value in changes.items()
    }
    if label == "Resume":
        assert "reason" in before and "reason" not in find_message(client, message_id)
    eventually(
        lambda: expected.items() <= find_message(client, message_id).items(), "the operation has its effect"
    )


def test_a_changed_condition_needs_another_dry_run_before_apply(tab: Tab, client: Client) -> None:
    send_for_region(client, "seen", "eu")
    page = open_dry_run(tab, "seen", "TRUE")
    apply = page.get_by_role("button", name="Apply")
    expect(apply).to_be_enabled()
    page.get_by_label("Condition").fill("region = 'us'")
    expect(apply).to_be_disabled()
    expect(page.locator("form .facts").first).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.get_by_text("No pending message meets this.")).to_be_visible()
    expect(apply).to_be_disabled()


def test_a_refused_condition_shows_its_error_in_the_form(tab: Tab, client: Client) -> None:
    tab.allowed = {400}
    send_for_region(client, "wrong", "eu")
    page = open_dry_run(tab, "wrong", "region = ")
    expect(page.locator("form .verdict")).to_contain_text("invalid_filter")
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()
    page = open_dry_run(tab, "", "")
    expect(page.locator("form .verdict")).to_contain_text("invalid_message")


def test_a_limit_of_due_times_selects_only_earlier_messages(tab: Tab, client: Client) -> None:
    times = {"early": "2031-01-31T08:00:00Z", "late": "2031-01-31T10:00:00Z"}
    assert (
        client.send("bounded", [{"id": name, "body": "x", "at": at} for name, at in times.items()]).status
        == 201
    )
    page = tab.open("bulk")
    page.get_by_label("Topics").fill("bounded")
    page.get_by_label("Due before").fill("2031-01-31T10:30:00")  # 09:30 in UTC
    page.get_by_role("button", name="Dry run").click()
    expect(page.locator("form .facts").last).to_contain_text("early")
    expect(page.get_by_text("1 message would be covered now.")).to_be_visible()
