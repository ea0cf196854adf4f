"""The page of recurring schedules with a real broker: the preview in its form, the day view, and every action."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.dashboard.answers import HOSTILE
from tests.dashboard.browser import Tab, overflow
from tests.dashboard.test_push import act, cell, row_of
from tests.edges.http.client import Client

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("browser")]
PATH = "/v1/schedules"
NIGHTLY = {"cron": "30 2 * * *", "zone": "Europe/Berlin"}


@pytest.fixture(autouse=True)
def none_left(client: Client) -> Iterator[None]:
    """Delete all schedules after a test."""
    yield
    for schedule in client.ask("GET", PATH).value["schedules"]:
        client.ask("DELETE", f"{PATH}/{schedule['name']}")


def create_schedule(client: Client, name: str, rule: dict[str, object], **fields: Any) -> dict[str, Any]:
    """Create a schedule of the topic "reports". Returns the answer of the broker."""
    answer = client.ask("PUT", f"{PATH}/{name}", {"rule": rule, "topic": "reports", "body": "x", **fields})
    assert answer.status == 201, answer
    return dict(answer.value)


def list_of(page: Page) -> Locator:
    """The table of schedules. The page has other tables too."""
    return page.get_by_role("table", name="Recurring schedules, by name")


def preview_of(client: Client, rule: dict[str, object]) -> list[str]:
    """The next times of a rule by the broker, as the form shows them."""
    times = client.ask("POST", "/v1/preview", {"rule": rule}).value["times"]
    return [time["local"].replace("T", " ") for time in times]


def test_a_schedule_is_created_in_a_form_that_previews_its_next_times(tab: Tab, client: Client) -> None:
    tab.allowed = {400, 404}
    page = tab.open("schedules")
    expect(page.get_by_text("No schedules.")).to_be_visible()
    page.get_by_role("button", name="New schedule").click()
    dialog = page.get_by_role("dialog")
    times = dialog.locator(".times li span.mono")
    expression, zone = dialog.get_by_label("Expression", exact=True), dialog.get_by_label("Time zone")
    zone.fill("America/New_York")
    expression.fill("*/7 * * * 1-5")
    expect(times).to_have_text(preview_of(client, {"cron": "*/7 * * * 1-5", "zone": "America/New_York"}))
    # The error of the broker is shown at the field that causes it.
    expression.fill("0 9 * * 1/2")
    expect(dialog.locator("#rule-cron-error")).to_contain_text("cron=")
    expect(expression).to_have_attribute("aria-invalid", "true")
    expect(expression).to_have_attribute("aria-describedby", re.compile("rule-cron-error"))
    expect(times).to_have_count(0)
    expression.fill("0 9 * * 1-5")
    zone.fill("Europe/Berln")
    expect(dialog.locator("#rule-zone-error")).to_contain_text("is no time zone")
    expect(dialog.locator("#rule-cron-error")).to_be_hidden()
    zone.fill("Europe/Berlin")
    expect(times).to_have_count(10)
    expect(dialog.get_by_text(re.compile("The next 10 times, in Europe/Berlin"))).to_be_visible()
    dialog.get_by_role("button", name="Make it").click()
    verdict = dialog.locator("form > .verdict")
    expect(verdict).to_have_text("Give it a name.")
    for label, text in (
        ("Name", "daily"),
        ("Topic", "reports"),
        ("Body", "make it"),
        ("Keys", "a b"),
        ("Tag", "eu"),
    ):
        dialog.get_by_label(label, exact=True).fill(text)
    dialog.get_by_role("button", name="Make it").click()
    expect(verdict).to_contain_text("Made. The next time is")
    dialog.get_by_role("button", name="Close").click()
    row = row_of(list_of(page), "daily")
    expect(cell(row, "Rule")).to_contain_text("0 9 * * 1-5")
    expect(row.locator(".state")).to_have_text("active")
    stored = client.ask("GET", f"{PATH}/daily").value
    assert stored["rule"] == {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin"}
    assert (stored["topic"], stored["body"], stored["keys"], stored["tag"]) == (
        "reports",
        "make it",
        ["a", "b"],
        "eu",
    )


@pytest.mark.parametrize(
    "rule",
    [
        {"every": "90m", "anchor": "2031-01-01T00:00:00Z", "count": 9},
        {"rrule": "DTSTART:20270129T090000\nRRULE:FREQ=MONTHLY;BYDAY=-1FR", "zone": "Asia/Tokyo"},
        {"at": ["2031-01-31T09:00:00", "2031-02-28T09:00:00"], "zone": "UTC", "gap": "skip", "fold": "both"},
        {"cron": "15 0 9 * * *", "seconds": True, "zone": "UTC", "starts_at": "2031-01-31T00:00:00",
         "ends_at": "2031-12-31T00:00:00", "exclude": ["2031-02-01"], "move": "after"},
    ],
    ids=["every", "rrule", "at", "cron"],
)  # fmt: skip
def test_a_change_of_a_schedule_keeps_its_other_fields(
    tab: Tab, client: Client, rule: dict[str, object]
) -> None:
    body = base64.b64encode(bytes(range(256))).decode()
    before = create_schedule(
        client, "kept", rule, body=None, base64=body, tag="eu", keys=["k1", "k2"], properties={"region": "eu"},
        catch_up="all", catch_up_within="2h", overlap="skip", group="makers",
    )  # fmt: skip
    page = tab.open("schedules")
    row = row_of(list_of(page), "kept")
    expect(row).to_contain_text("moved after 2031-02-01" if "move" in rule else "kept")
    row.get_by_role("button", name="Change").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".times li").first).to_be_visible()
    dialog.get_by_label("Topic", exact=True).fill("others")
    dialog.get_by_role("button", name="Change it").click()
    expect(dialog.locator("form > .verdict")).to_contain_text("Changed.")
    after = client.ask("GET", f"{PATH}/kept").value
    changing = ("topic", "next", "outcome", "runs")
    assert {key: after[key] for key in after if key not in changing} == {
        key: before[key] for key in before if key not in changing
    }
    assert after["topic"] == "others"


def test_a_schedule_with_an_existing_name_is_refused(tab: Tab, client: Client) -> None:
    create_schedule(client, "taken", NIGHTLY)
    page = tab.open("schedules")
    page.get_by_role("button", name="New schedule").click()
    dialog = page.get_by_role("dialog")
    for label, text in (("Name", "taken"), ("Topic", "elsewhere")):
        dialog.get_by_label(label, exact=True).fill(text)
    dialog.get_by_role("button", name="Make it").click()
    expect(dialog.locator("form > .verdict")).to_contain_text("There is a schedule of this name")
    assert client.ask("GET", f"{PATH}/taken").value["topic"] == "reports"


def test_a_schedule_is_run_paused_resumed_and_deleted(tab: Tab, client: Client) -> None:
    create_schedule(client, "nightly", NIGHTLY)
    page = tab.open("schedules")
    row = row_of(list_of(page), "nightly")
    act_on(page, row, "Run now", "Send it", "Sent: nightly.run-")
    assert len(client.receive("reports", "readers").value["messages"]) == 1
    act_on(page, row, "Pause", "Pause", "Paused.")
    expect(row.locator(".state")).to_have_text("paused")
    expect(cell(row, "Next")).to_contain_text("–")
    assert client.ask("GET", f"{PATH}/nightly").value["state"] == "paused"
    act_on(page, row, "Resume", "Resume", "Resumed. The next time is")
    expect(row.locator(".state")).to_have_text("active")
    row.get_by_role("button", name="nightly").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Its last times")
    expect(dialog).to_contain_text("None is known.")
    page.keyboard.press("Escape")
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Leave it").click()
    assert client.ask("GET", f"{PATH}/nightly").status == 200
    act(page, row.get_by_role("button", name="Delete"), "Delete the schedule", "Deleted.")
    expect(page.get_by_text("No schedules.")).to_be_visible()


def act_on(page: Page, row: Locator, opener: str, label: str, status_text: str) -> None:
    """Click the button `opener` of a row, confirm by the button `label`, and expect a text in the status."""
    row.get_by_role("button", name=opener).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=label).click()
    expect(dialog.get_by_role("status")).to_contain_text(status_text)
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("dialog")).to_have_count(0)


def test_schedules_are_listed_in_pages(tab: Tab, client: Client) -> None:
    for number in range(27):
        create_schedule(client, f"many-{number:02}", NIGHTLY, topic="others" if number == 3 else "reports")
    page = tab.open("schedules")
    rows = list_of(page).locator("tbody tr")
    expect(rows).to_have_count(25)
    page.get_by_role("button", name="Next ›").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="‹ Previous").click()
    expect(rows).to_have_count(25)
    page.get_by_label("Topic").select_option("others")
    expect(rows).to_have_count(1)


# Time zone, day, its hours, the text about the change of the clock, and the local time of NIGHTLY on this day.
DAYS = {
    "gap": ("Europe/Berlin", "2027-03-28", 23, "Clocks go forward from 02:00 to 03:00", "03:00"),
    "fold": ("Europe/Berlin", "2027-10-31", 25, "Clocks go back from 03:00 to 02:00", "02:30"),
    "half an hour": (
        "Australia/Lord_Howe",
        "2027-04-04",
        24.5,
        "Clocks go back from 02:00 to 01:30",
        "11:00",
    ),
    "no midnight": ("Africa/Cairo", "2027-04-30", 23, "Clocks go forward from 00:00 to 01:00", "03:30"),
    "plain": ("Asia/Tokyo", "2027-03-27", 24, None, "10:30"),
}


@pytest.mark.parametrize("name", DAYS)
def test_the_day_view_marks_changes_of_the_clock(tab: Tab, client: Client, name: str) -> None:
    zone, day, hours, change, time = DAYS[name]
    create_schedule(client, "nightly", NIGHTLY)
    create_schedule(client, "often", {"every": "1m"}, topic="often")
    page = tab.open("schedules")
    page.get_by_label("Day", exact=True).fill(day)
    page.get_by_label("Time zone").fill(zone)
    page.get_by_label("Time zone").press("Enter")
    changes = page.locator(".changes li")
    expect(changes).to_have_count(1 if change else 0)
    if change:
        expect(changes).to_contain_text(change)
    lane = page.get_by_role("img", name=re.compile("^30 2 "))
    expect(lane).to_have_attribute("aria-label", f"30 2 * * *: {time}")
    lanes = page.locator(".lanes tbody tr")
    expect(lanes.nth(0).locator("td.number")).to_have_text("1")
    expect(lanes.nth(1).locator("td.number")).to_have_text("1,000 or more")
    expect(page.locator(".chart .marks rect")).to_have_count(int(hours * 60))
    # The schedule "often" is due in each minute, and "nightly" once.
    expect(page.get_by_text(f"{int(hours * 60) + 1:,} messages due by the minute")).to_be_visible()
    expect(page.locator(".peaks li").first).to_have_text(f"{time}: 2")
    assert overflow(page) <= 0


def test_the_day_view_reports_a_day_that_its_zone_does_not_have(tab: Tab, client: Client) -> None:
    tab.allowed = {400}
    create_schedule(client, "nightly", NIGHTLY)
    page = tab.open("schedules")
    zone = page.get_by_label("Time zone")
    for text, day, error_text in (
        ("Pacific/Apia", "2011-12-30", "Pacific/Apia has no 2011-12-30."),
        ("Atlantis/Poseidonis", "2027-03-27", "is no time zone"),
    ):
        page.get_by_label("Day", exact=True).fill(day)
        zone.fill(text)
        zone.press("Enter")
        expect(page.locator("#day-error")).to_contain_text(error_text)
        expect(page.locator(".lanes")).to_be_hidden()
    expect(zone).to_have_attribute("aria-invalid", "true")
    zone.fill("UTC")
    zone.press("Enter")
    expect(page.locator(".lanes")).to_be_visible()


def test_a_minute_of_the_day_view_is_opened_with_the_keyboard(tab: Tab, client: Client) -> None:
    create_schedule(client, "often", {"every": "1m"})
    page = tab.open("schedules")
    page.get_by_label("Day", exact=True).fill("2027-03-27")
    chart = page.get_by_role("group", name="Messages due in each minute")
    expect(page.locator(".chart .marks rect").first).to_be_attached()
    chart.focus()
    for key in ("End", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator(".readout")).to_contain_text("23:58: 1 due")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Coming")
    expect(page.locator(".tile-note").first).to_contain_text("1 by schedules")


def test_html_in_schedules_is_shown_as_text(tab: Tab, client: Client) -> None:
    create_schedule(
        client, "hostile", NIGHTLY, body=HOSTILE.replace("\x00", ""), tag="<b>", topic="onerror-alert"
    )
    page = tab.open("schedules")
    row_of(list_of(page), "hostile").get_by_role("button", name="Change").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Body")).to_have_value(re.compile("<script>"))
    assert page.locator("#page img, #page script, dialog img, dialog script").count() == 0
