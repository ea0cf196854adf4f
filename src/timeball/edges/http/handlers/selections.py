"""Requests for selections: bulk operations on the pending messages that meet a condition."""

from __future__ import annotations

import msgspec

from timeball.broker.registry.selections import FIRST_MS, LAST_MS, SelectionFacts, Survey
from timeball.broker.service import Broker
from timeball.edges.http.codec import Answer, format_time
from timeball.edges.http.requests import Call, Paths, check_no_body, read_request
from timeball.model import time_parsing
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage
from timeball.model.http_api import At, DryRun, HourLoad, SelectedMessage, Selecting, Selection, SelectionList


class Selections:
    """Serves the paths of selections. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._selections, self._policy = broker.selections, broker.policy
        path = "/v1/selections/{selection}"
        self.paths: Paths = {
            "/v1/selections": {"GET": self._list, "POST": self._select},
            "/v1/selections/dry-run": {"POST": self._dry_run},
            path: {"GET": self._get},
            f"{path}/undo": {"POST": self._undo},
        }

    async def _list(self, call: Call) -> Answer:
        selections = self._selections.all(call.caller)
        return Answer(200, SelectionList([self._show(name, facts) for name, facts in selections.items()]))

    async def _get(self, call: Call) -> Answer:
        name = call.path["selection"]
        return Answer(200, self._show(name, self._selections.get(name, call.caller)))

    async def _select(self, call: Call) -> Answer:
        facts = await self._read_selection(call)
        name = await self._selections.select(facts, call.caller)
        return Answer(201, self._show(name, self._selections.get(name, call.caller)))

    async def _dry_run(self, call: Call) -> Answer:
        return Answer(
            200, _show_survey(await self._selections.dry_run(await self._read_selection(call), call.caller))
        )

    async def _undo(self, call: Call) -> Answer:
        """Undo a selection for those of its messages that have not become due since."""
        await check_no_body(call, self._policy, Verb.LOOK)
        name = call.path["selection"]
        await self._selections.undo(name, call.caller)
        return Answer(200, self._show(name, self._selections.get(name, call.caller)))

    async def _read_selection(self, call: Call) -> SelectionFacts:
        """Read the selection in the body. Its `seq` and `at_ms` are 0: it is not accepted yet.

        Raises the errors of `read_request`, InvalidDelay, and InvalidMessage if it would select all messages.
        """
        # The topics are in the body, which is not read from callers who may cancel nothing.
        self._policy.allow_somewhere(call.caller, Verb.CANCEL)
        request: Selecting = await read_request(call, Selecting, self._policy, Verb.LOOK)
        from_ms, to_ms = _parse_time(request.start, "from"), _parse_time(request.to, "to")
        if not (request.where or request.topics) and from_ms is to_ms is None:
            raise InvalidMessage(
                "give a condition, topics, or bounds of the due time; the condition TRUE selects all messages"
            )
        shift_ms = (
            0 if request.shift is msgspec.UNSET else time_parsing.signed_duration_ms(request.shift, "shift")
        )
        return SelectionFacts(
            action=request.action, shift_ms=shift_ms, to_topic=request.to_topic, seq=0, at_ms=0,
            where=request.where, topics=request.topics,
            from_ms=FIRST_MS if from_ms is None else from_ms, to_ms=LAST_MS if to_ms is None else to_ms,
        )  # fmt: skip

    def _show(self, name: str, facts: SelectionFacts) -> Selection:
        """Build the answer that shows a selection and its state."""
        return Selection(
            id=name, action=facts.action, state=self._selections.state(name), shift_ms=facts.shift_ms,
            to_topic=facts.to_topic or None,
            accepted=format_time(facts.at_ms), accepted_ms=facts.at_ms, by=facts.by or None,
            where=facts.where or None, topics=facts.topics,
            start=None if facts.from_ms == FIRST_MS else format_time(facts.from_ms),
            to=None if facts.to_ms == LAST_MS else format_time(facts.to_ms), count=facts.count,
            first_due=_format_known_time(facts.first_due_ms), last_due=_format_known_time(facts.last_due_ms),
            undone=format_time(facts.undone_ms) if facts.is_undone else None,
        )  # fmt: skip


def _parse_time(at: At | msgspec.UnsetType, name: str) -> int | None:
    """Parse a bound of the due time to ms since 1970, None if it is missing. Raises InvalidDelay."""
    return None if at is msgspec.UNSET else time_parsing.due_ms(at, name)


def _format_known_time(time_ms: int) -> str | None:
    """Format a time. None for a time below 0, which is not known."""
    return None if time_ms < 0 else format_time(time_ms)


def _show_survey(survey: Survey) -> DryRun:
    """Build the answer to a dry run: the number of messages, examples, and the load of each hour before and after."""
    return DryRun(
        count=survey.count,
        first_due=_format_known_time(survey.first_due_ms),
        last_due=_format_known_time(survey.last_due_ms),
        samples=[
            SelectedMessage(topic, format_time(due_ms), due_ms, message_id, (keys or "").split())
            for due_ms, topic, message_id, keys in survey.samples
        ],
        load=[HourLoad(format_time(hour_ms), before, after) for hour_ms, before, after in survey.hours],
    )
