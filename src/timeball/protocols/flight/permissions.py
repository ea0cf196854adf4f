"""Who calls, and whether they may: asked of each call before anything is done with it.

A call's headers say who, before any of its request has been received. What is asked is told from the decoded
request, and of a send from the topics of each batch. A verb that has no line here is for administrators.

A cancel names promises, and only they say which topics are meant: `cancellable` goes along to the broker, for which
promises of other topics are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from timeball.access import Access, Principal, Verb
from timeball.clock import Clock
from timeball.errors import Forbidden
from timeball.protocols.flight import codec
from timeball.protocols.flight.exchange import Columns


class Permissions:
    """The way from a call to who makes it; without an access file everybody may do everything."""

    def __init__(self, access: Access | None, clock: Clock) -> None:
        self._access, self._clock = access, clock

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Principal | None:
        """Return who makes a call with these headers; None where nobody asks. Raises Unauthorized."""
        if self._access is None:
            return None
        return self._access.authenticate(headers_of(metadata), self._clock.wall_ms())


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return the headers that are text; a name that is there twice has the first value."""
    headers: dict[str, str] = {}
    for name, value in metadata:
        if isinstance(value, str):
            headers.setdefault(name.lower(), value)
    return headers


def check_action(caller: Principal | None, verb: str, request: codec.ActionRequest) -> None:
    """Raise Forbidden unless the caller may ask for this action."""
    if caller is None:
        return
    match request:
        case codec.Nothing() if verb in ("status", "topics"):
            caller.check(Verb.LOOK)
        case codec.Queues():
            caller.check(Verb.LOOK, topic=request.topic)
        case codec.GetOffsets() | codec.Commit():
            caller.check(Verb.RECEIVE, topic=request.topic, group=request.group)
        case codec.Cancel() | codec.Reschedule():
            caller.check(Verb.LOOK)  # an account; of which topics, `cancellable` says
        case _:
            caller.check(Verb.ADMIN)


def cancellable(caller: Principal | None) -> Callable[[str], bool] | None:
    """Whether the caller may take back messages of a topic; None: of all."""
    if caller is None or caller.may(Verb.ADMIN):
        return None
    return lambda topic: caller.may(Verb.CANCEL, topic=topic)


def shown(caller: Principal | None, verb: str, answer: Any) -> Any:
    """The answer to an action, as far as the caller may see it."""
    if caller is None or verb != "topics":
        return answer
    return {
        "topics": {name: it for name, it in answer["topics"].items() if caller.may(Verb.LOOK, topic=name)}
    }


def check_ticket(caller: Principal | None, request: codec.Ticket) -> None:
    """Raise Forbidden unless the caller may read this."""
    if caller is None:
        return
    if isinstance(request, codec.ReadLog):
        caller.check(Verb.ADMIN)
    else:
        caller.check(Verb.RECEIVE, topic=request.topic)


def check_release(caller: Principal | None) -> None:
    """Raise Forbidden unless the caller may bring what is due."""
    if caller is not None:
        caller.check(Verb.ADMIN)


class PermittedColumns:
    """The batches of a send stream, each with topics its sender may send to, as of now."""

    def __init__(self, columns: Columns, caller: Principal) -> None:
        self._columns, self._caller = columns, caller

    def adopt(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """See Columns; raises Forbidden and Unauthorized besides."""
        batch = self._columns.adopt(batch)
        for topic in pc.unique(batch.column("topic")).to_pylist():
            if topic is None:
                raise Forbidden("a row without a topic")
            self._caller.check(Verb.SEND, topic=topic)
        return batch
