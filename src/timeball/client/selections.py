"""Bulk operations by query over the HTTP API: `Timeball.selections`. See async_timeball.py for the awaitable ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from timeball.client.http_codec import JSON, encode, path
from timeball.client.http_connection import Request
from timeball.model.http_api import DryRun, Selecting, Selection, SelectionList
from timeball.model.time_parsing import At, due_ms

if TYPE_CHECKING:
    from timeball.client.http_calls import HttpCalls


class Selections:
    """The bulk operations of a broker. Each covers the pending messages that meet a condition, and can be undone."""

    def __init__(self, calls: HttpCalls) -> None:
        """See `Timeball.selections`."""
        self._calls = calls

    def cancel(
        self, where: str = "", *, topics: Iterable[str] = (), start: At | None = None, to: At | None = None
    ) -> Selection:
        """Cancel all pending messages that meet a condition. Messages that are sent later are not covered.

        Args:
            where: An SQL condition, as in docs/filters.md. It knows also due_ms, topic, keys, tag and campaign.
            topics: Only messages of these topics. Without topics only an administrator may select.
            start: Only messages that are due at this time or later.
            to: Only messages that are due before this time.

        Raises:
            InvalidFilter: The condition is invalid.
            InvalidMessage: None of the arguments was given.
            OverLimit: There are too many selections.
        """
        wanted = _wanted("cancel", where, topics, start, to)
        request = Request("POST", path("selections"), encode(wanted), JSON)
        return self._calls.ask_json(request, Selection, lambda answer: answer, is_repeatable=False)

    def dry_run(
        self, where: str = "", *, topics: Iterable[str] = (), start: At | None = None, to: At | None = None
    ) -> DryRun:
        """Count the messages that `cancel` with these arguments would cover now, and show the first of them."""
        wanted = _wanted("cancel", where, topics, start, to)
        request = Request("POST", path("selections", "dry-run"), encode(wanted), JSON)
        return self._calls.ask_json(request, DryRun, lambda answer: answer)

    def undo(self, id: str) -> Selection:
        """Make the messages of a selection pending again, except those that were due since. May be repeated."""
        return self._calls.ask_json(
            Request("POST", path("selections", id, "undo")), Selection, lambda answer: answer
        )

    def get(self, id: str) -> Selection:
        """Read a selection. Raises NotFound."""
        return self._calls.ask_json(Request("GET", path("selections", id)), Selection, lambda answer: answer)

    def all(self) -> list[Selection]:
        """Read the selections whose topics you may change, the newest last."""
        return self._calls.ask_json(
            Request("GET", path("selections")), SelectionList, lambda answer: answer.selections
        )


def _wanted(
    action: Literal["cancel"], where: str, topics: Iterable[str], start: At | None, to: At | None
) -> Selecting:
    start_ms, to_ms = (msgspec.UNSET if at is None else due_ms(at) for at in (start, to))
    return Selecting(action=action, where=where, topics=[*topics], start=start_ms, to=to_ms)
