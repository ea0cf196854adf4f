"""Timeball, the Python client: send a message now, and the broker puts it into its queue at its due time.

    from timeball import Timeball

    with Timeball("http://127.0.0.1:7480") as ball:
        ball.send("orders", "close order 17 if unpaid", after="30m")

The scheme of the endpoint selects the protocol:

    http://, https://         the HTTP API: all operations, without pyarrow, also in a child process after a fork
    grpc://, grpc+tls://      Flight: columns as well (`send_many` of tables, `pull_batch`, `browse`, `read_log`). Needs
                              the extra `arrow`. gRPC does not survive a fork: in a child of a process that has already
                              made a call, every call raises RequestError at once instead of hanging

Any number of threads can share one object. It connects at its first call, and reconnects when the broker has been away.

When a method returns, its effect is on the broker's disk (the effect of `commit` follows within about a second). When
it raises, the class of the error shows who must act (`timeball.model.errors`), and its text states the remedy.

List the nodes of a cluster in one endpoint, "http://host1:7480,host2:7480". Each node can answer. The client tries the
next one when a node does not.

In the examples below `endpoint` is a broker's address, and `flight_endpoint` that of its Flight port.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import msgspec

from timeball.client import positions
from timeball.client.credentials import credentials
from timeball.client.reader import Reader
from timeball.client.receipts import IfSettled, Receipt, SendSummary
from timeball.client.rows import Body, Outgoing, outgoing
from timeball.io.clock import SystemClock
from timeball.model import limits, wire
from timeball.model.answers import (
    Attached,
    DeadLetterPage,
    GroupPage,
    GroupState,
    MessagePlace,
    QueueRange,
    Resolved,
    Verdict,
)
from timeball.model.errors import InvalidDelay, NotFound, RequestError
from timeball.model.time_parsing import After, At, when
from timeball.model.values import Keys

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client.calls import Calls
    from timeball.client.http_calls import HttpCalls
    from timeball.client.outgoing import Rows
    from timeball.client.schedules import Schedules

ENDPOINT = "http://127.0.0.1:7480"
WINDOW = 32  # the default number of batches of a send_many that may wait for their answers


class Sends(Protocol):
    """The sends of one protocol."""

    def send(self, message: Outgoing, *, retry: bool, if_settled: IfSettled) -> Receipt:
        """Send a message. It is on the broker's disk on return."""

    def send_many(
        self,
        rows: Rows,
        topic: str | None,
        batch_rows: int | None,
        window: int,
        collect: bool,
        retry: bool,
        if_settled: IfSettled,
    ) -> SendSummary:
        """Send rows in batches. Timeball.send_many documents the arguments."""

    def close(self) -> None:
        """Finish the sends that are under way."""


class Timeball(Reader):
    """A connection to a broker. Thread safe, and a context manager that closes the connection.

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
        """Prepare a connection. The client dials at the first call.

        Credentials that are not given are read from the environment variables TIMEBALL_ACCESS_KEY, TIMEBALL_SECRET_KEY
        and TIMEBALL_TLS_ROOTS (the path of a PEM file).

        Args:
            endpoint: The broker's address: http:// or https://host:port (port 7480 by default), or grpc:// or
                grpc+tls://host:port for Flight. For a cluster, list the nodes: http://host:port,host:port.
            timeout_ms: The longest time for an answer, in milliseconds. A long poll may take its waiting time in
                addition.
            access_key: The access key, for a broker with access control. Give both keys or neither.
            secret_key: The secret key that belongs to `access_key`.
            tls_roots: PEM certificates of the authorities to trust, for a broker with TLS. The default is the system's
                list (https), or that of gRPC.

        Raises:
            RequestError: The endpoint is malformed, `timeout_ms` is below 1, or the credentials are incomplete or
                unreadable.
            ModuleNotFoundError: The endpoint is one of Flight, and pyarrow is not installed.
        """
        self._constructor_arguments = (endpoint, timeout_ms, access_key, secret_key, tls_roots)
        if timeout_ms <= 0:
            raise RequestError(f"timeout_ms={timeout_ms}: at least 1")
        clock, who = SystemClock(), credentials(access_key, secret_key, tls_roots)
        self._sender: Sends
        self._connection: Calls | HttpCalls
        self._http_calls: HttpCalls | None = None
        if endpoint.startswith(("http://", "https://")):
            from timeball.client.http_calls import HttpCalls  # each protocol's own libraries
            from timeball.client.http_sender import HttpSender

            http_calls = HttpCalls(endpoint, timeout_ms, who)
            self._connection = self._http_calls = http_calls
            self._sender = HttpSender(http_calls)
            super().__init__(http_calls, None, clock)
        else:
            from timeball.client.calls import Calls  # needs pyarrow
            from timeball.client.sender import Sender

            calls = Calls(endpoint, timeout_ms, who)
            self._connection, self._sender = calls, Sender(calls, clock)
            super().__init__(calls, calls, clock)

    def close(self) -> None:
        """Close the connection. Waits a few seconds for answers that are still under way."""
        self._sender.close()
        self._connection.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of the constructor, keys included, so that the copy dials a connection of its own."""
        return _recreate, self._constructor_arguments

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
        """Send one message. It becomes visible at once, after a delay, or at a due time.

        The message is on the broker's disk when this method returns.

        With `retry=True` a send may be repeated, also by a program that starts again and gives the same `message_id`.
        The broker accepts the message once: it remembers the id for a day, and for a day after the due time. The
        receipt of a repeated send has `outcome="exists"` and the current state and due time of the message.

        Args:
            topic: The topic. Unless the broker is configured otherwise, the first send creates it.
            body: The content. A str is encoded as UTF-8.
            tag: One word that consumers can filter by.
            keys: One key, or a list of keys. You can cancel or reschedule the message by each of them. A key contains
                no blanks.
            properties: Further names and values, all of them text.
            after: The delay: a timedelta, or text such as "250ms", "30m" or "1h30m". The broker adds it to its own
                clock.
            at: The due time: an aware datetime, RFC 3339 text, or milliseconds since 1970 UTC. A due time that has
                passed means at once. Give `after` or `at`, not both.
            message_id: The id of the message. Without one, the client makes a unique id.
            retry: Send the message again when the answer is lost. The broker accepts it once.
            if_settled: With "send" and `retry=True`, send the message again if the earlier one is settled, that is,
                released or cancelled. With "keep", leave it settled.

        Returns:
            The receipt, with the id, the sequence number and the due time of the message.

        Raises:
            InvalidMessage: A name, a size or a property is not accepted.
            InvalidDelay: The due time or the delay is not accepted.
            Conflict: With `retry=True`: a send of another message has used this topic and id.
            OverLimit: The broker has reached a limit. Try again later.
            Unavailable: The broker cannot be reached, or the answer was lost. The text states which.

        >>> ball = Timeball(endpoint)
        >>> ball.send("orders", b"close order 17 if unpaid", keys="order-17", after="30m").seq >= 0
        True
        >>> from datetime import datetime, timedelta, timezone
        >>> tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
        >>> len(ball.send("orders", "remind customer 4", at=tomorrow).id)
        32
        >>> ball.send("orders", "what?", at=datetime(2030, 1, 1))
        Traceback (most recent call last):
        timeball.model.errors.InvalidDelay: at=2030-01-01T00:00:00: without a time zone it names a different instant ...
        >>> ball.close()
        """
        message = outgoing(topic, body, tag, keys, properties, message_id, after, at)
        return self._sender.send(message, retry=retry, if_settled=if_settled)

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
        """Send many messages in pipelined batches. The broker accepts each batch as a whole or not at all.

        A table, a record batch or a list of at most 65,536 rows and 4 MiB is one batch. Larger inputs, readers and
        generators are split into batches of 8,192 rows, or of `batch_rows`. The method returns when the broker has
        answered every batch.

        The columns (or the keys of the dicts) are `topic` and `body`, and optionally `tag`, `keys`, `properties`,
        `unique_key` (the message id), `queue_id`, `born_ms`, `flag`, `due_ms`, `delay_ms`, `at` (a timestamp with a
        time zone) and `after` (a duration).

        Args:
            rows: A table, a record batch, a record batch reader, or an iterable of dicts.
            topic: The topic of all rows, where the rows have no column `topic`.
            batch_rows: The largest number of rows in a batch, from 1 to 131,072.
            window: The number of batches that may wait for their answers at the same time, at least 1.
            on_refused: With "raise", the first refused batch ends the call with the broker's error. With "collect", the
                call continues, and the summary lists the refused rows.
            retry: Send a batch again when its answer is lost. The broker accepts it once.
            if_settled: As for `send`, for whole batches.

        Returns:
            The summary: the ids of all rows, and the accepted, refused and unknown rows.

        Raises:
            InvalidMessage: A column or a value is not accepted.
            InvalidDelay: A due time or a delay is not accepted, or is null in a table.
            TimeballError: The error of the batch that ended the call. Its text states which rows were accepted, and its
                `summary` is a SendSummary of the accepted, refused and unknown rows.

        >>> import pyarrow as pa
        >>> with Timeball(flight_endpoint) as ball:
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
        """Look a message up by its id: its state, due time, queue and offset.

        The states are `waiting`, `visible`, `cancelled` and `expired` (settled so long ago that the broker no longer
        keeps the outcome).

        Args:
            id: The message id. If several messages have it, the newest one is returned.
            topic: Consider only messages that were sent to this topic.

        Returns:
            The state of the message. Times are in milliseconds since 1970 UTC.

        Raises:
            NotFound: The broker does not know a message with this id.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 20", after="30m")
        ...     place = ball.get(receipt.id)
        ...     place.state, place.due_ms == receipt.due_ms
        ('waiting', True)
        """
        messages = self._calls.action("get", wire.Get(id=id, topic=topic), dict[str, list[MessagePlace]])[
            "messages"
        ]
        if not messages:
            raise NotFound(f"no message with the id {id!r} is known here")
        return messages[0]

    @overload
    def cancel(self, id: str) -> Verdict: ...
    @overload
    def cancel(self, *, key: str) -> list[Verdict]: ...
    @overload
    def cancel(self, *, ids: Iterable[str]) -> list[Verdict]: ...
    def cancel(
        self, id: str | None = None, *, key: str | None = None, ids: Iterable[str] | None = None
    ) -> Verdict | list[Verdict]:
        """Cancel a scheduled message by its id, several by their ids, or all messages that have a key.

        Give exactly one of the three arguments. Each verdict is definite: `cancelled` means that the message will not
        be delivered, `released` means that the cancel came too late. answers.Verdict lists all verdicts.

        Args:
            id: The id of one message. If several scheduled messages have this id, the result is the verdict of the one
                that this call settled, else of the newest.
            key: Cancel every scheduled message that has this key.
            ids: The ids of several messages. More than 10,000 ids are sent in several requests.

        Returns:
            One verdict for an `id`. For a `key` or `ids`, a list with a verdict for each scheduled message.

        Raises:
            RequestError: Not exactly one of the arguments was given.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 18", keys="order-18", after="30m")
        ...     ball.cancel(receipt.id).verdict
        ...     [verdict.verdict for verdict in ball.cancel(key="order-18")]
        'cancelled'
        ['already_cancelled']
        """
        return self._cancel_or_reschedule("cancel", wire.Cancel(), id, key, ids)

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
        """Change the due time of a scheduled message. Messages are named as for `cancel`.

        The change is one atomic step. The verdict `rescheduled` means that the message is delivered once, at the new
        due time and not at the old one. Every other verdict is the one that `cancel` would have returned, and then
        nothing was changed.

        Args:
            id: The id of one message, as for `cancel`.
            key: Reschedule every scheduled message that has this key.
            ids: The ids of several messages. More than 10,000 ids are sent in several requests.
            after: The delay from now by the broker's clock: a timedelta, or text such as "30m".
            at: The new due time: an aware datetime, RFC 3339 text, or milliseconds since 1970 UTC. Give `after` or
                `at`.

        Returns:
            One verdict for an `id`. For a `key` or `ids`, a list with a verdict for each scheduled message.

        Raises:
            InvalidDelay: Neither `after` nor `at` was given, or the value is not accepted.
            RequestError: Not exactly one of `id`, `key` and `ids` was given.

        >>> with Timeball(endpoint) as ball:
        ...     receipt = ball.send("orders", "close order 19", after="30m")
        ...     moved = ball.reschedule(receipt.id, after="2h")
        ...     moved.verdict, moved.due_ms > receipt.due_ms
        ('rescheduled', True)
        """
        delay_ms, due_ms = when(after, at)
        if delay_ms is None and due_ms is None:
            raise InvalidDelay("reschedule to when? give after= or at=")
        return self._cancel_or_reschedule(
            "reschedule", wire.Reschedule(delay_ms=delay_ms, due_ms=due_ms), id, key, ids
        )

    def _cancel_or_reschedule(
        self,
        verb: str,
        body: wire.Cancel | wire.Reschedule,
        id: str | None,
        key: str | None,
        ids: Iterable[str] | None,
    ) -> Verdict | list[Verdict]:
        """Run the action `verb` with `body` for one id, for a key, or for ids in chunks that a request may have."""
        if sum(name is not None for name in (id, key, ids)) != 1:
            raise RequestError(f"{verb} by one of: id, key=, ids=")

        def request(**names: list[str]) -> list[Verdict]:
            request = msgspec.structs.replace(body, **names)
            return self._calls.action(verb, request, dict[str, list[Verdict]])["verdicts"]

        if id is not None:
            return request(ids=[id])[0]
        if key is not None:
            return request(keys=[key])
        all_ids, verdicts = list(ids or ()), list[Verdict]()
        for begin in range(0, len(all_ids), limits.CANCELS_PER_REQUEST_MAX):
            verdicts += request(ids=all_ids[begin : begin + limits.CANCELS_PER_REQUEST_MAX])
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
        """Read rows of the log with from_seq <= seq < to_seq, in READ_SCHEMA.

        Only rows that are on disk are returned. Batches arrive as you read them, and the call has no time limit.

        Args:
            from_seq: The first sequence number.
            to_seq: The sequence number after the last one. It may lie beyond the end of the log.
            kinds: Read only rows of these kinds (`message.Kind`). The default is all kinds.
            columns: Read and send only these columns. The default is all columns of READ_SCHEMA.
            coalesce_rows: The broker joins rows into batches of at least about this many rows.

        Returns:
            A reader of record batches, in the order of the log.

        Raises:
            OutOfRange: The log no longer keeps the row `from_seq`.

        >>> with Timeball(flight_endpoint) as ball:
        ...     seq = ball.send("audit", "x").seq
        ...     ball.read_log(seq, seq + 1).read_all().column("topic").to_pylist()
        ['audit']
        """
        return self._flight("read_log").stream(
            wire.ReadLog(
                from_seq=from_seq,
                to_seq=to_seq,
                kinds=None if kinds is None else [int(kind) for kind in kinds],
                columns=None if columns is None else list(columns),
                coalesce_rows=coalesce_rows,
            )
        )

    def read_queue(self, topic: str, queue_id: int, offset: int, rows: int) -> pa.RecordBatchReader:
        """Read visible rows of one queue, without waiting. Moves no position and leases nothing.

        Args:
            topic: The topic.
            queue_id: The number of the queue in the topic.
            offset: The offset of the first row.
            rows: The largest number of rows, from 1 to 65,536.

        Returns:
            A reader of one record batch in READ_SCHEMA.

        Raises:
            NotFound: The topic or the queue does not exist.
            OutOfRange: The offset lies outside the range that the queue keeps.
        """
        import pyarrow as pa  # only for a client over Flight

        calls = self._flight("read_queue")
        batch = calls.rows(wire.ReadQueue(topic=topic, queue_id=queue_id, offset=offset, rows=rows))
        return pa.RecordBatchReader.from_batches(batch.schema, [batch])

    # ---- administration ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Read the broker's state: its version, the number of pending messages, lateness and more.

        docs/flight.md describes the fields.
        """
        return self._calls.action("status", wire.Nothing(), dict[str, Any])

    def topics(self) -> dict[str, int]:
        """List all topics with their numbers of queues."""
        answer = self._calls.action("topics", wire.Nothing(), dict[str, dict[str, dict[str, int]]])
        return {name: topic["queues"] for name, topic in answer["topics"].items()}

    def groups(self, group: str | None = None) -> list[GroupState]:
        """List all consumer groups, or read one: its lag, its messages in flight and its dead letters.

        Args:
            group: The name of one group. The default is all groups, ordered by name.

        Raises:
            GroupNotFound: The group does not exist.
        """
        page = self._calls.action("groups", wire.Groups(group=group), GroupPage)
        groups = page.groups
        while page.next_page is not None:
            page = self._calls.action("groups", wire.Groups(after=page.next_page), GroupPage)
            groups += page.groups
        return groups

    def dead_letters(
        self, group: str, *, max_messages: int = 100, after: str | None = None
    ) -> DeadLetterPage:
        """List the dead letters of a group that are neither resent nor deleted, the oldest first in each queue.

        A dead letter is a message that the group has given up.

        Args:
            group: The name of the group.
            max_messages: The largest number of dead letters, from 1 to 1,000.
            after: The `next_page` of the previous page. The default is the first page.

        Returns:
            A page of dead letters. Its `next_page` is None on the last page.

        Raises:
            GroupNotFound: The group does not exist.

        >>> from timeball import Timeball
        >>> with Timeball(endpoint) as ball:
        ...     messages = ball.pull("orders", "billing", wait="0s")  # which makes the group
        ...     ball.dead_letters("billing").dead_letters
        []
        """
        request = wire.DeadLetters(group=group, rows=max_messages, after=after)
        return self._calls.action("dead_letters", request, DeadLetterPage)

    def resend_dead_letters(self, group: str, dead_letters: Sequence[str] | None = None) -> Resolved:
        """Deliver dead letters to their group again, with their attempts counted from 0. Durable on return.

        Args:
            group: The name of the group.
            dead_letters: The handles of at most 1,000 dead letters (`DeadLetterRow.dead_letter`). The default is all
                that are left.

        Returns:
            The number of dead letters that were resent, and for each given handle whether the dead letter was found.
        """
        request = wire.ResolveDeadLetters(
            group=group, dead_letters=None if dead_letters is None else [*dead_letters]
        )
        return self._calls.action("resend_dead_letters", request, Resolved)

    def delete_dead_letters(self, group: str, dead_letters: Sequence[str] | None = None) -> Resolved:
        """Delete dead letters, so that the group does not receive them again. Durable on return.

        Args:
            group: The name of the group.
            dead_letters: The handles of at most 1,000 dead letters (`DeadLetterRow.dead_letter`). The default is all
                that are left.

        Returns:
            The number of dead letters that were deleted, and for each given handle whether the dead letter was found.
        """
        request = wire.ResolveDeadLetters(
            group=group, dead_letters=None if dead_letters is None else [*dead_letters]
        )
        return self._calls.action("delete_dead_letters", request, Resolved)

    def create_topic(self, topic: str, queues: int = 8) -> None:
        """Create a topic, or add queues to one that has fewer. Durable on return.

        Unless the broker is configured otherwise, the first send to a topic creates it too.

        Args:
            topic: The name, 1 to 127 characters.
            queues: The number of queues, from 1 to 1,024.

        Raises:
            InvalidName: The topic may not have this name.
        """
        self._calls.action("create_topic", wire.CreateTopic(topic=topic, queues=queues), dict[str, Any])

    def queues(self, topic: str) -> dict[int, QueueRange]:
        """List the first and the next offset of each queue of a topic. Raises NotFound for an unknown topic."""
        return positions.queues(self._calls, topic)

    @property
    def schedules(self) -> Schedules:
        """The recurring schedules of the broker: put, get, all, pause, resume, delete, run, preview, history.

        Raises:
            RequestError: The endpoint is one of Flight.
        """
        if self._http_calls is None:
            raise RequestError("schedules need an endpoint of HTTP, such as http://127.0.0.1:7480")
        from timeball.client.schedules import Schedules  # most programs have none

        return Schedules(self._http_calls)

    # ---- for programs that build the pending table --------------------------------------------------------

    def reserve(self, rows: int) -> int:
        """Reserve `rows` sequence numbers (at most 2^40) for a later bulk attach, and return the first of them."""
        return self._flight("reserve").action("reserve", wire.Reserve(rows=rows), dict[str, int])["first_seq"]

    def attach(self, attachment: bytes) -> Attached:
        """Attach data files to the pending table. A repeated attach of the same job and epoch has no further effect.

        Args:
            attachment: The JSON of a `table.attachment.Attachment`.

        Returns:
            The new version and watermark of the table. `repeated` is true if the broker had already attached these
                files.

        Raises:
            OutOfRange: The attachment does not begin at the current watermark.
            RequestError: The same job and epoch were attached with another digest.
        """
        return self._flight("attach").action("attach", attachment, Attached)

    def compact(self) -> Attached | None:
        """Make the broker move the tail of its log to the pending table now.

        Returns the new version and watermark of the table, or None if no row was added to the log since the last
        compaction. Raises RequestError if the broker's strategy is not `hour_log`.
        """
        answer = self._flight("compact").action("compact", wire.Nothing(), dict[str, Any])
        return Attached(**answer) if answer else None

    def lease_compaction(self, lease_ms: int) -> None:
        """Announce an outside compactor: for `lease_ms` milliseconds the broker does not compact by itself.

        At most an hour counts. 0 ends the lease.
        """
        self._flight("lease_compaction").action("compactor", wire.Lease(lease_ms=lease_ms), dict[str, Any])


def _recreate(
    endpoint: str, timeout_ms: int, access_key: str | None, secret_key: str | None, tls_roots: bytes | None
) -> Timeball:
    """Create a copy of a pickled client from its arguments. Pickle calls this in the process that loads the copy."""
    return Timeball(
        endpoint, timeout_ms=timeout_ms, access_key=access_key, secret_key=secret_key, tls_roots=tls_roots
    )
