"""Timeball, the client: hand a message over now, and it is in its queue at the instant you named.

    from timeball import Timeball

    with Timeball("grpc://127.0.0.1:7400") as ball:
        ball.send("orders", "close order 17 if unpaid", after="30m")

One object serves any number of threads. It connects with its first call and again when the broker has been
away. A process that forks makes its first call behind the fork: a child of a process that has called is told so by
each call of its own, and waits for nothing. When a method returns, what it says is on the broker's disk; when it
raises, the error's class says who must act (`timeball.errors`), and its sentence says what to do.

A cluster's nodes are named together, "grpc://host1:7400,host2:7400": each answers, and the next one is tried when one
does not.

In the examples below `endpoint` is a broker's address, as in "grpc://127.0.0.1:7400".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import pyarrow as pa

from timeball import limits, wire
from timeball.client import browser, outgoing
from timeball.client.calls import Calls
from timeball.client.dialing import credentials
from timeball.client.outgoing import IDENTIFIERS, Body, Rows
from timeball.client.reader import Reader
from timeball.client.sender import IfSettled, Receipt, Sender, SendSummary
from timeball.client.tracing import current_context
from timeball.clock import SystemClock
from timeball.errors import InvalidDelay, NotFound, RequestError
from timeball.instants import After, At, when
from timeball.rules import Keys
from timeball.trace_context import with_contexts
from timeball.wire import (
    Attached,
    DeadLetterPage,
    GroupPage,
    GroupState,
    MessagePlace,
    QueueRange,
    Resolved,
    Verdict,
)

ENDPOINT = "grpc://127.0.0.1:7400"
WINDOW = 32  # batches of a send_many on their way at once


class Timeball(Reader):
    """A connection to a broker; a context manager.

    >>> with Timeball(endpoint) as ball:
    ...     receipt = ball.send("greetings", "hello", after="5m")
    >>> receipt.due_ms > receipt.store_ms
    True
    """

    def __init__(
        self,
        endpoint: str = ENDPOINT,
        *,
        timeout_ms: int = 30_000,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls_roots: bytes | None = None,
    ) -> None:
        """`timeout_ms`: how long any answer may take, long polls apart.

        Keys: for a broker with access control. `tls_roots`: certificates of the authority to trust, PEM, for a
        broker at grpc+tls://; else those that gRPC knows. Credentials not given are taken from TIMEBALL_ACCESS_KEY,
        TIMEBALL_SECRET_KEY and TIMEBALL_TLS_ROOTS (a path).
        """
        self._dialled_as = (endpoint, timeout_ms, access_key, secret_key, tls_roots)
        if timeout_ms <= 0:
            raise RequestError(f"timeout_ms={timeout_ms}: at least 1")
        clock = SystemClock()
        self._calls = Calls(endpoint, timeout_ms, credentials(access_key, secret_key, tls_roots))
        self._sender = Sender(self._calls, clock)
        super().__init__(self._calls, clock)

    def close(self) -> None:
        """Let go of the connection. Answers under way are waited for, a little."""
        self._sender.close()
        self._calls.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle how it was made, keys included: behind it stands a client that dials for itself."""
        return _dialled_as, self._dialled_as

    def __enter__(self) -> Timeball:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- sending ----------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: Body,
        *,
        tag: str | None = None,
        keys: Keys | None = None,
        properties: Mapping[str, str] | None = None,
        after: After | None = None,
        at: At | None = None,
        message_id: str | None = None,
        retry: bool = False,
        if_settled: IfSettled = "keep",
    ) -> Receipt:
        """Send one message: visible at once, `after` a while, or `at` an instant.

        `after`: a timedelta, or text ("250ms", "30m", "1h30m"). `at`: an aware datetime, or milliseconds
        since 1970. `keys`: a name it can be cancelled by, or a list of them. `message_id`: made if not
        given. `retry`: send again if the answer was lost; the broker knows the id for a day and for a day after the
        due time, and takes it once. So a program that starts again may repeat a send by its `message_id`: the receipt
        says `outcome="exists"`, and the message's current state and due time. `if_settled="send"`: if that message does
        not wait any more, because it was cancelled or released, send this one.

        Raises InvalidMessage, InvalidDelay, OverLimit; Unavailable if the broker cannot be reached, or the answer
        was lost (the text says which).

        >>> ball = Timeball(endpoint)
        >>> ball.send("orders", b"close order 17 if unpaid", keys="order-17", after="30m").seq >= 0
        True
        >>> from datetime import datetime, timedelta, timezone
        >>> tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
        >>> len(ball.send("orders", "remind customer 4", at=tomorrow).id)
        32
        >>> ball.send("orders", "what?", at=datetime(2030, 1, 1))
        Traceback (most recent call last):
        timeball.errors.InvalidDelay: at=2030-01-01T00:00:00: without a time zone it names a different instant ...
        >>> ball.close()
        """
        relative_ms, due_ms = when(after, at)
        key = IDENTIFIERS.next_id() if message_id is None else message_id
        batch = outgoing.one(
            topic, body, tag, keys, properties, key, self._clock.wall_ms(), relative_ms, due_ms
        )
        if context := current_context():
            batch = with_contexts(batch, [context])
        ack = self._sender.send(batch, retry=retry, if_settled=if_settled)
        if ack.states:
            now = ack.states[0]
            return Receipt(key, ack.first_seq, now.due_ms, ack.store_ms, ack.outcome, now.state)
        if relative_ms is not None:
            due_ms = ack.store_ms + relative_ms
        state = "visible" if due_ms is None or due_ms <= ack.store_ms else "waiting"
        past_ms = 0 if due_ms is None else max(0, ack.store_ms - due_ms)
        return Receipt(key, ack.first_seq, due_ms, ack.store_ms, ack.outcome, state, past_ms)

    def send_many(
        self,
        rows: Rows,
        *,
        topic: str | None = None,
        batch_rows: int | None = None,
        window: int = WINDOW,
        on_refused: Literal["raise", "collect"] = "raise",
        retry: bool = False,
        if_settled: IfSettled = "keep",
    ) -> SendSummary:
        """Send a table, a record batch, a reader or an iterable of dicts; pipelined, each batch atomic.

        A table, a record batch or a list of up to 65,536 rows and 4 MiB is one batch: all its rows are accepted or
        none. Larger ones, readers and generators are sent in batches of 8,192 rows, or of `batch_rows`.

        Columns (or keys of the dicts): topic and body, and of tag, keys, properties, unique_key, queue_id, born_ms,
        flag, due_ms, delay_ms, at (timestamp with zone), after (duration) what there is. `topic` fills a
        missing column. Returns when every batch was answered. A refused batch ends it with the broker's error; its text
        says which rows were accepted, and its `summary` (a SendSummary) lists the accepted, refused and unknown ones.
        With on_refused="collect" it goes on, and the summary that it returns lists them. `retry`: send a batch again if
        its answer was lost; the broker takes it once. `if_settled`: as for `send`, of whole batches.

        >>> import pyarrow as pa
        >>> with Timeball(endpoint) as ball:
        ...     orders = pa.table({"body": [b"17", b"18"], "delay_ms": [60_000, 90_000]})
        ...     ball.send_many(orders, topic="orders").rows
        2
        """
        if batch_rows is not None and not 0 < batch_rows <= limits.FRAME_ROWS_MAX:
            raise RequestError(f"batch_rows={batch_rows}: between 1 and {limits.FRAME_ROWS_MAX}")
        if window < 1:
            raise RequestError(f"window={window}: at least 1")
        if on_refused not in ("raise", "collect"):
            raise RequestError(f"on_refused={on_refused!r}: 'raise' or 'collect'")
        collect = on_refused == "collect"
        return self._sender.send_many(rows, topic, batch_rows, window, collect, retry, if_settled)

    def get(self, id: str, topic: str | None = None) -> MessagePlace:
        """Return where the message with this id is: waiting, visible, cancelled or expired; raise NotFound.

        Of several messages with one id: the newest. `topic`: of those sent to it.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 20", after="30m")
        ...     place = ball.get(receipt.id)
        ...     place.state, place.due_ms == receipt.due_ms
        ('waiting', True)
        """
        found = self._calls.action("get", wire.Get(id=id, topic=topic), dict[str, list[MessagePlace]])[
            "messages"
        ]
        if not found:
            raise NotFound(f"no message with the id {id!r} is known here")
        return found[0]

    @overload
    def cancel(self, id: str) -> Verdict: ...
    @overload
    def cancel(self, *, key: str) -> list[Verdict]: ...
    @overload
    def cancel(self, *, ids: Iterable[str]) -> list[Verdict]: ...
    def cancel(
        self, id: str | None = None, *, key: str | None = None, ids: Iterable[str] | None = None
    ) -> Verdict | list[Verdict]:
        """Take a delayed message back: by its id, several by their ids, or all that have a key.

        A verdict is definite: `cancelled` will not be delivered, `released` was too late (answers.Verdict has all).
        Of several promises with one id a single `id` returns the verdict of the one ended now, else of the newest.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 18", keys="order-18", after="30m")
        ...     ball.cancel(receipt.id).verdict
        ...     [verdict.verdict for verdict in ball.cancel(key="order-18")]
        'cancelled'
        ['already_cancelled']
        """
        return self._settle("cancel", {}, id, key, ids)

    @overload
    def reschedule(self, id: str, *, after: After | None = None, at: At | None = None) -> Verdict: ...
    @overload
    def reschedule(self, *, key: str, after: After | None = None, at: At | None = None) -> list[Verdict]: ...
    @overload
    def reschedule(
        self, *, ids: Iterable[str], after: After | None = None, at: At | None = None
    ) -> list[Verdict]: ...
    def reschedule(
        self,
        id: str | None = None,
        *,
        key: str | None = None,
        ids: Iterable[str] | None = None,
        after: After | None = None,
        at: At | None = None,
    ) -> Verdict | list[Verdict]:
        """Move a delayed message to another instant: `after` a while from now, or `at` one. Named as for `cancel`.

        One atomic step: `rescheduled` will be delivered then, once, and not at its old instant; any other verdict is
        the one that `cancel` would have given. Raises InvalidDelay.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 19", after="30m")
        ...     moved = ball.reschedule(receipt.id, after="2h")
        ...     moved.verdict, moved.due_ms > receipt.due_ms
        ('rescheduled', True)
        """
        delay_ms, due_ms = when(after, at)
        if delay_ms is None and due_ms is None:
            raise InvalidDelay("reschedule to when? give after= or at=")
        moved = {"delay_ms": delay_ms} if due_ms is None else {"due_ms": due_ms}
        return self._settle("reschedule", moved, id, key, ids)

    def _settle(
        self,
        verb: str,
        body: Mapping[str, int | None],
        id: str | None,
        key: str | None,
        ids: Iterable[str] | None,
    ) -> Verdict | list[Verdict]:
        if sum(name is not None for name in (id, key, ids)) != 1:
            raise RequestError(f"{verb} by one of: id, key=, ids=")

        def ask(**names: list[str]) -> list[Verdict]:
            return self._calls.action(verb, {**body, **names}, dict[str, list[Verdict]])["verdicts"]

        if id is not None:
            return ask(ids=[id])[0]
        if key is not None:
            return ask(keys=[key])
        wanted, verdicts = list(ids or ()), list[Verdict]()
        for start in range(0, len(wanted), limits.CANCELS_PER_REQUEST_MAX):
            verdicts += ask(ids=wanted[start : start + limits.CANCELS_PER_REQUEST_MAX])
        return verdicts

    # ---- reading as tables ------------------------------------------------------------------------------

    def read_log(
        self,
        from_seq: int,
        to_seq: int,
        *,
        kinds: Iterable[int] | None = None,
        columns: Sequence[str] | None = None,
        coalesce_rows: int = wire.COALESCE_ROWS,
    ) -> pa.RecordBatchReader:
        """Rows of the log with from_seq <= seq < to_seq, in READ_SCHEMA; of these kinds (`message.Kind`) only.

        `columns`: only these are read and sent.

        >>> with Timeball(endpoint) as ball:
        ...     seq = ball.send("audit", "x").seq
        ...     ball.read_log(seq, seq + 1).read_all().column("topic").to_pylist()
        ['audit']
        """
        return self._calls.stream(
            wire.ReadLog(
                from_seq=from_seq,
                to_seq=to_seq,
                kinds=None if kinds is None else [int(kind) for kind in kinds],
                columns=None if columns is None else list(columns),
                coalesce_rows=coalesce_rows,
            )
        )

    def read_queue(self, topic: str, queue_id: int, offset: int, rows: int) -> pa.RecordBatchReader:
        """Visible rows of one queue from an offset on, without waiting; moves no position."""
        batch = self._calls.rows(wire.ReadQueue(topic=topic, queue_id=queue_id, offset=offset, rows=rows))
        return pa.RecordBatchReader.from_batches(batch.schema, [batch])

    # ---- administration ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return how much the broker holds and how late it is (docs/flight.md names the fields)."""
        return self._calls.action("status", wire.Nothing(), dict[str, Any])

    def topics(self) -> dict[str, int]:
        """All topics, with their number of queues."""
        found = self._calls.action("topics", wire.Nothing(), dict[str, dict[str, dict[str, int]]])
        return {name: topic["queues"] for name, topic in found["topics"].items()}

    def groups(self, group: str | None = None) -> list[GroupState]:
        """All consumer groups, or one: how far behind, how many dead letters. Raises GroupNotFound."""
        page = self._calls.action("groups", wire.Groups(group=group), GroupPage)
        found = page.groups
        while page.next_page is not None:
            page = self._calls.action("groups", wire.Groups(after=page.next_page), GroupPage)
            found += page.groups
        return found

    def dead_letters(
        self, group: str, *, max_messages: int = 100, after: str | None = None
    ) -> DeadLetterPage:
        """Messages that a group has given up and that are left; `after`: the `next_page` of the page before.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     messages = ball.pull("orders", "billing", wait="0s")  # which makes the group
        ...     ball.dead_letters("billing").dead_letters
        []
        """
        request = wire.DeadLetters(group=group, rows=max_messages, after=after)
        return self._calls.action("dead_letters", request, DeadLetterPage)

    def resend_dead_letters(self, group: str, dead_letters: Sequence[str] | None = None) -> Resolved:
        """Send these dead letters, or all that are left, to the group again, with all attempts ahead."""
        request = wire.ResolveDeadLetters(
            group=group, dead_letters=None if dead_letters is None else [*dead_letters]
        )
        return self._calls.action("resend_dead_letters", request, Resolved)

    def delete_dead_letters(self, group: str, dead_letters: Sequence[str] | None = None) -> Resolved:
        """Put these dead letters, or all that are left, aside for good; durable on return."""
        request = wire.ResolveDeadLetters(
            group=group, dead_letters=None if dead_letters is None else [*dead_letters]
        )
        return self._calls.action("delete_dead_letters", request, Resolved)

    def create_topic(self, topic: str, queues: int = 8) -> None:
        """Make a topic; the first send makes one too, unless the broker is set not to."""
        self._calls.action("create_topic", wire.CreateTopic(topic=topic, queues=queues), dict[str, Any])

    def queues(self, topic: str) -> dict[int, QueueRange]:
        """First and next offset of each queue of a topic; NotFound."""
        return browser.queues(self._calls, topic)

    # ---- for those who build the pending table ------------------------------------------------------------

    def reserve(self, rows: int) -> int:
        """Set aside `rows` sequence numbers for a later bulk attach; returns the first."""
        return self._calls.action("reserve", wire.Reserve(rows=rows), dict[str, int])["first_seq"]

    def attach(self, attachment: bytes) -> Attached:
        """Make files part of the pending table: the JSON of a `table.attachment.Attachment`. Safe to repeat."""
        return self._calls.action("attach", attachment, Attached)

    def compact(self) -> Attached | None:
        """Have the broker move its log's tail to the pending table now; None if there was nothing worth it."""
        answer = self._calls.action("compact", wire.Nothing(), dict[str, Any])
        return Attached(**answer) if answer else None

    def lease_compaction(self, lease_ms: int) -> None:
        """Say that an outside compactor is at work for so long: the broker does not compact meanwhile."""
        self._calls.action("compactor", wire.Lease(lease_ms=lease_ms), dict[str, Any])


def _dialled_as(
    endpoint: str, timeout_ms: int, access_key: str | None, secret_key: str | None, tls_roots: bytes | None
) -> Timeball:
    """Return a client that was made as another one was, in another process."""
    return Timeball(
        endpoint, timeout_ms=timeout_ms, access_key=access_key, secret_key=secret_key, tls_roots=tls_roots
    )
