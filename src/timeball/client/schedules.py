"""Recurring schedules over the HTTP API: `Timeball.schedules`. See async_timeball.py for the awaitable ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from timeball.client.http_codec import JSON, Operation, Page, encode, listed, path
from timeball.client.http_connection import Request
from timeball.model.http_api import (
    History,
    PastOccurrence,
    Previewing,
    Schedule,
    ScheduleDeleted,
    SchedulePage,
    SchedulePut,
    ScheduleRun,
    Time,
    Times,
    ZonesInUse,
)
from timeball.model.time_parsing import due_ms
from timeball.model.values import CatchUp, Overlap

if TYPE_CHECKING:
    from timeball.client.http_calls import HttpCalls


class Schedules:
    """The recurring schedules of a broker. All methods may raise NotFound for an unknown name."""

    def __init__(self, calls: HttpCalls) -> None:
        """Use these calls of operations."""
        self._calls = calls

    def put(
        self,
        name: str,
        rule: Mapping[str, object],
        *,
        topic: str,
        body: str | bytes,
        tag: str | None = None,
        keys: Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        catch_up: CatchUp = "latest",
        catch_up_within: str = "1d",
        overlap: Overlap = "allow",
        group: str = "",
    ) -> Schedule:
        """Create or replace a schedule. With equal content nothing changes, so each of your processes may call it.

        Args:
            name: The name, 1 to 120 of the characters letters, digits, % | _ and -.
            rule: The rule, such as {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin"}. See docs/recurring-rules.md.
            topic: The topic of the messages.
            body: The body of each message, at most 64 KiB.
            tag: The tag of each message.
            keys: The business keys of each message.
            properties: The properties of each message. The broker adds `schedule`, `occurrence` and `scheduled_ms`.
            catch_up: The times that were missed and are still delivered: "latest", "all" or "none".
            catch_up_within: The longest time for which a missed time is delivered.
            overlap: With "skip", an occurrence is left out while `group` has not finished the previous one.
            group: The consumer group for `overlap`.

        Raises:
            InvalidDelay: The rule is invalid, or has no time later than now.
            InvalidMessage: A send would refuse such a message.
            OverLimit: There are too many schedules.
        """
        text, data = (body, None) if isinstance(body, str) else (None, body)
        schedule_put = SchedulePut(
            rule=dict(rule), topic=topic, body=text, base64=data, tag=tag, keys=listed("keys", keys),
            properties=dict(properties or {}), catch_up=catch_up, catch_up_within=catch_up_within,
            overlap=overlap, group=group,
        )  # fmt: skip
        return self._ask_schedule(Request("PUT", path("schedules", name), encode(schedule_put), JSON))

    def get(self, name: str) -> Schedule:
        """Read a schedule and its progress."""
        return self._ask_schedule(Request("GET", path("schedules", name)))

    def all(self, topic: str | None = None) -> list[Schedule]:
        """Read all schedules that you may see, ordered by name. With `topic`, only those of this topic."""

        def decode(data: bytes) -> Page[Schedule]:
            page = msgspec.json.decode(data, type=SchedulePage)
            return page.schedules, page.next_page

        def page_after(name: str | None) -> Operation[Page[Schedule]]:
            return Operation(Request("GET", path("schedules", topic=topic, page=name)), decode, True)

        return self._calls.network.drive(self._calls.read_pages(page_after))

    def pause(self, name: str) -> Schedule:
        """Cancel the pending occurrence, and deliver nothing until `resume`."""
        return self._ask_schedule(Request("POST", path("schedules", name, "pause")))

    def resume(self, name: str) -> Schedule:
        """Continue a paused or failed schedule. `catch_up` decides about the times that were missed."""
        return self._ask_schedule(Request("POST", path("schedules", name, "resume")))

    def delete(self, name: str) -> None:
        """Delete a schedule, and cancel its pending occurrence."""
        return self._calls.ask_json(
            Request("DELETE", path("schedules", name)), ScheduleDeleted, lambda _: None
        )

    def run(self, name: str) -> str:
        """Send a message of the template now. Returns its id. A repeated call sends another message."""
        request = Request("POST", path("schedules", name, "run"))
        return self._calls.ask_json(request, ScheduleRun, lambda answer: answer.id, is_repeatable=False)

    def preview(
        self, rule: Mapping[str, object], *, count: int = 10, after: str | int | None = None
    ) -> list[Time]:
        """Compute the next times of a rule. Nothing is stored.

        Args:
            rule: The rule.
            count: The number of times, at most 1,000. The result is shorter if the rule ends.
            after: The times are later than this one: RFC 3339 with a zone, or milliseconds since 1970. Default: now.

        Raises:
            InvalidDelay: The rule or `after` is invalid.
        """
        start = msgspec.UNSET if after is None else due_ms(after, "after")
        previewing = Previewing(rule=dict(rule), start=start, count=count)
        return self._calls.ask_json(
            Request("POST", path("preview"), encode(previewing), JSON), Times, lambda answer: answer.times
        )

    def history(self, name: str) -> list[PastOccurrence]:
        """Read what became of the last ten times of the rule, the newest first."""
        request = Request("GET", path("schedules", name, "history"))
        return self._calls.ask_json(request, History, lambda answer: answer.occurrences)

    def zones(self) -> ZonesInUse:
        """Read the broker's version of tzdata, the time zones in use, and the moves of the last update of tzdata."""
        return self._calls.ask_json(Request("GET", path("zones")), ZonesInUse, lambda answer: answer)

    def _ask_schedule(self, request: Request) -> Schedule:
        """Make a request that is answered with a schedule, and is safe to repeat."""
        return self._calls.ask_json(request, Schedule, lambda answer: answer)
