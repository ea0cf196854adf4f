"""Bulk operations by query over the HTTP API: `Timeball.selections`. See async_timeball.py for the awaitable ones."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from timeball.client.http_codec import JSON, encode, listed, path
from timeball.client.http_connection import Request
from timeball.model.http_api import Action, DryRun, Selecting, Selection, SelectionList
from timeball.model.time_parsing import At, due_ms, signed_duration_ms

if TYPE_CHECKING:
    from timeball.client.http_calls import HttpCalls


class Selections:
    """The bulk operations of a broker. Each covers the pending messages that meet a condition, and can be undone."""

    def __init__(self, calls: HttpCalls) -> None:
        """Use these calls of operations."""
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
        return self._select(_build_selecting("cancel", where, topics, start, to))

    def shift(
        self,
        by: timedelta | str,
        where: str = "",
        *,
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> Selection:
        """Make the messages due later, or earlier if `by` is negative, as in "-30m". Never before now.

        The other arguments and the errors are those of `cancel`.
        """
        return self._select(_build_selecting("shift", where, topics, start, to, shift=by))

    def pause(
        self,
        where: str = "",
        *,
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> Selection:
        """Hold the messages until they are resumed. Arguments and errors are those of `cancel`."""
        return self._select(_build_selecting("pause", where, topics, start, to))

    def resume(
        self,
        where: str = "",
        *,
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> Selection:
        """Release held messages at their due times, or at once. Arguments and errors are those of `cancel`."""
        return self._select(_build_selecting("resume", where, topics, start, to))

    def release(
        self,
        where: str = "",
        *,
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> Selection:
        """Release the messages now, also held ones. Arguments and errors are those of `cancel`."""
        return self._select(_build_selecting("release", where, topics, start, to))

    def move(
        self,
        to_topic: str,
        where: str = "",
        *,
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> Selection:
        """Release the messages to another topic when they are due.

        The other arguments and the errors are those of `cancel`.
        """
        return self._select(_build_selecting("move", where, topics, start, to, to_topic=to_topic))

    def dry_run(
        self,
        where: str = "",
        *,
        action: Action = "cancel",
        by: timedelta | str | None = None,
        to_topic: str = "",
        topics: Iterable[str] = (),
        start: At | None = None,
        to: At | None = None,
    ) -> DryRun:
        """Count the messages that the method `action` with these arguments would cover now, and show the first ones.

        `by` is the argument of `shift`, and `to_topic` that of `move`. The errors are those of `cancel`.
        """
        selecting = _build_selecting(action, where, topics, start, to, shift=by, to_topic=to_topic)
        request = Request("POST", path("selections", "dry-run"), encode(selecting), JSON)
        return self._calls.ask_json(request, DryRun, lambda answer: answer)

    def undo(self, id: str) -> Selection:
        """Undo a selection for all of its messages that were not due since. May be repeated. Raises NotFound."""
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

    def _select(self, selecting: Selecting) -> Selection:
        """Ask for a selection. Not repeated after a lost answer: that would be a second selection."""
        request = Request("POST", path("selections"), encode(selecting), JSON)
        return self._calls.ask_json(request, Selection, lambda answer: answer, is_repeatable=False)


def _build_selecting(
    action: Action,
    where: str,
    topics: Iterable[str],
    start: At | None,
    to: At | None,
    *,
    shift: timedelta | str | None = None,
    to_topic: str = "",
) -> Selecting:
    """Build the body of a request from the arguments of a method. Raises InvalidDelay and InvalidMessage."""
    start_ms, to_ms = (
        msgspec.UNSET if at is None else due_ms(at, name) for at, name in ((start, "start"), (to, "to"))
    )
    return Selecting(
        action=action, shift=msgspec.UNSET if shift is None else f"{signed_duration_ms(shift)}ms", to_topic=to_topic,
        where=where, topics=listed("topics", topics), start=start_ms, to=to_ms,
    )  # fmt: skip
