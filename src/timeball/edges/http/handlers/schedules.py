"""Requests for recurring schedules and time zones."""

from __future__ import annotations

import asyncio

from timeball.broker.service import Broker
from timeball.edges.http.codec import Answer
from timeball.edges.http.requests import Call, Paths, check_no_body, parse_row_count, read_request
from timeball.edges.http.schedule_codec import (
    preview_after_ms,
    show_history,
    show_schedule,
    show_times,
    show_zones,
    to_facts,
)
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.http_api import Previewing, ScheduleDeleted, SchedulePage, SchedulePut, ScheduleRun

PAGE_ROWS = 100


class Schedules:
    """Serves the paths of recurring schedules. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._schedules, self._policy, self._zones = broker.schedules, broker.policy, broker.zone_updates
        path = "/v1/schedules/{name}"
        self.paths: Paths = {
            "/v1/schedules": {"GET": self._list},
            path: {"GET": self._get, "PUT": self._put, "DELETE": self._delete},
            f"{path}/pause": {"POST": self._pause},
            f"{path}/resume": {"POST": self._resume},
            f"{path}/run": {"POST": self._run},
            f"{path}/history": {"GET": self._get_history},
            "/v1/preview": {"POST": self._preview},
            "/v1/zones": {"GET": self._get_zones},
        }

    async def _list(self, call: Call) -> Answer:
        rows = parse_row_count(call, PAGE_ROWS, limits.LISTED_ROWS_MAX)
        page = await self._schedules.page(
            rows, call.query.get("page", ""), call.query.get("topic"), call.caller
        )
        size_bytes = sum(len(shown.facts.body) for shown in page.schedules)
        answer = SchedulePage([show_schedule(shown) for shown in page.schedules], page.next_page)
        return Answer(200, answer, size_bytes=size_bytes)

    async def _get(self, call: Call) -> Answer:
        return Answer(200, show_schedule(await self._schedules.get(call.path["name"], call.caller)))

    async def _put(self, call: Call) -> Answer:
        """Create or replace a schedule. A new one is answered with 201."""
        # The topic is in the body, which is not read from callers who may send to no topic.
        self._policy.allow_somewhere(call.caller, Verb.SEND)
        request: SchedulePut = await read_request(call, SchedulePut, self._policy, Verb.LOOK)
        # In a thread, as for a preview: a rule with `count` computes all its times.
        facts = await asyncio.to_thread(to_facts, request)
        shown, outcome = await self._schedules.put(call.path["name"], facts, call.caller)
        return Answer(201 if outcome == "created" else 200, show_schedule(shown, outcome))

    async def _delete(self, call: Call) -> Answer:
        await self._schedules.delete(call.path["name"], call.caller)
        return Answer(200, ScheduleDeleted(call.path["name"]))

    async def _pause(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        return Answer(200, show_schedule(await self._schedules.pause(call.path["name"], call.caller)))

    async def _resume(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        return Answer(200, show_schedule(await self._schedules.resume(call.path["name"], call.caller)))

    async def _run(self, call: Call) -> Answer:
        await check_no_body(call, self._policy, Verb.LOOK)
        name = call.path["name"]
        return Answer(201, ScheduleRun(name, await self._schedules.run(name, call.caller)))

    async def _get_history(self, call: Call) -> Answer:
        name = call.path["name"]
        return Answer(200, show_history(name, await self._schedules.history(name, call.caller)))

    async def _preview(self, call: Call) -> Answer:
        self._policy.allow_somewhere(call.caller, Verb.LOOK)
        request: Previewing = await read_request(call, Previewing, self._policy, Verb.LOOK)
        times = await self._schedules.preview(
            request.rule, preview_after_ms(request), request.count, call.caller
        )
        return Answer(200, show_times(times))

    async def _get_zones(self, call: Call) -> Answer:
        return Answer(200, show_zones(self._zones.facts(call.caller)))
