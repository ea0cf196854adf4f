"""Timeball, the Python client: send a message now, and the broker puts it into its queue at its due time.

    from timeball import Timeball

    with Timeball("http://127.0.0.1:7480") as ball:
        ball.send("orders", "close order 17 if unpaid", after="30m")

Operations go over HTTP, also in a child process after a fork. Columns (`send_many` of tables, `browse`, `read_log`) go
over Flight. They need the extra `arrow`, and the address of the Flight port in `flight`:

    with Timeball("http://127.0.0.1:7480", flight="grpc://127.0.0.1:7400") as ball:
        ball.send_many(table, topic="orders")

A program that uses columns only can give the address of Flight as its endpoint. gRPC does not survive a fork: in a
child of a process that has used Flight, each call for columns raises RequestError at once instead of hanging.

Any number of threads can share one object. It connects at its first call, and reconnects when the broker has been away.

When a method returns, its effect is on the broker's disk (the effect of `commit` follows within about a second). When
it raises, the class of the error shows who must act (`timeball.model.errors`), and its text states the remedy.

List the nodes of a cluster in one endpoint, "http://host1:7480,host2:7480". Each node can answer. The client tries the
next one when a node does not.

In the examples below `endpoint` is a broker's address, and `flight_endpoint` that of its Flight port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from timeball.client import http_codec
from timeball.client.credentials import credentials
from timeball.client.http_calls import HttpCalls
from timeball.client.http_sender import HttpSender
from timeball.client.reader import Reader
from timeball.client.receipts import IfSettled, Receipt, SendSummary
from timeball.client.rows import ArrowColumns, Body, build_message, is_arrow
from timeball.io.clock import SystemClock
from timeball.model import limits, wire
from timeball.model.answers import (
    Attached,
    DeadLetterPage,
    GroupState,
    MessagePlace,
    QueueRange,
    Resolved,
    Verdict,
)
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.send_options import OnExpiry, OnPending, Spread
from timeball.model.time_parsing import After, At, delay_ms, due_ms, when
from timeball.model.values import Keys

if TYPE_CHECKING:
    import pyarrow as pa

    from timeball.client.schedules import Schedules
    from timeball.client.selections import Selections

ENDPOINT = "http://127.0.0.1:7480"
WINDOW = 32  # the default number of batches of a send_many that may wait for their answers


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
        flight: str | None = None,
        timeout_ms: int = 30_000,
        access_key: str | None = None,
        secret_key: str | None = None,
        tls_roots: bytes | None = None,
    ) -> None:
        """Prepare a connection. The client dials at the first call.

        Credentials that are not given are read from the environment variables TIMEBALL_ACCESS_KEY, TIMEBALL_SECRET_KEY
        and TIMEBALL_TLS_ROOTS (the path of a PEM file).

        Args:
            endpoint: The broker's address: http:// or https://host:port (port 7480 by default). For a cluster, list
                the nodes: http://host:port,host:port. Or only an address for `flight`.
            flight: The address of the broker's Flight port, for columns: grpc:// or grpc+tls://host:port, with nodes
                as for `endpoint`.
            timeout_ms: The longest time for an answer, in milliseconds. A long poll may take its waiting time in
                addition.
            access_key: The access key, for a broker with access control. Give both keys or neither.
            secret_key: The secret key that belongs to `access_key`.
            tls_roots: PEM certificates of the authorities to trust, for a broker with TLS. The default is the system's
                list (https), or that of gRPC.

        Raises:
            RequestError: The endpoint is malformed, `timeout_ms` is below 1, or the credentials are incomplete or
                unreadable.
            ModuleNotFoundError: An address of Flight is given, and pyarrow is not installed.
        """
        self._constructor_arguments = (endpoint, flight, timeout_ms, access_key, secret_key, tls_roots)
        if timeout_ms <= 0:
            raise RequestError(f"timeout_ms={timeout_ms}: at least 1")
        clock, who = SystemClock(), credentials(access_key, secret_key, tls_roots)
        http = None
        if endpoint.startswith(("http://", "https://")):
            http = HttpCalls(endpoint, timeout_ms, who)
        elif flight is None and endpoint.startswith("grpc"):
            flight = endpoint
        else:
            raise RequestError(f"endpoint {endpoint!r}: write it as http://host:port")
        if flight is None:
            super().__init__(http, None, clock)
            return
        from timeball.client.calls import Calls  # needs pyarrow

        super().__init__(http, Calls(flight, timeout_ms, who), clock)

    def close(self) -> None:
        """Close the connections."""
        for calls in (self._http, self._flight):
            if calls is not None:
                calls.close()

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
        zone: str | None = None,
        message_id: str | None = None,
        retry: bool = False,
        if_settled: IfSettled = "keep",
        unique_key: str | None = None,
        on_pending: OnPending | None = None,
        expires_at: At | None = None,
        expires_in: After | None = None,
        on_expiry: OnExpiry | None = None,
        window: After | None = None,
        spread: Spread | None = None,
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
            zone: The IANA name of a time zone. Then `at` is a local time in it: text without an offset, or a datetime
                without a tzinfo. The due time follows changes of the zone's rules.
            message_id: The id of the message. Without one, the client makes a unique id.
            retry: Send the message again when the answer is lost. The broker accepts it once.
            if_settled: With "send" and `retry=True`, send the message again if the earlier one is settled, that is,
                released or cancelled. With "keep", leave it settled.
            unique_key: At most one message of the topic with this key is pending.
            on_pending: The rule for a second one: "reject" raises AlreadyPending, "keep" returns the receipt of the
                pending message, "replace" cancels it and sends this one in one step. The default is that of the topic
                ("reject").
            expires_at: The last time at which the message may be released, in the forms of `at`.
            expires_in: The longest time from the due time to the release, in the forms of `after`.
            on_expiry: "cancel" (the default) cancels an expired message, "move" releases it into %EXPIRED%<topic>.
            window: The broker chooses the due time, from `at` or `after` on and at most this much later. The receipt
                contains it.
            spread: "even" (the default) chooses by the message id, "level" the second with the fewest pending messages.

        Returns:
            The receipt, with the id, the sequence number and the due time of the message.

        Raises:
            InvalidMessage: A name, a size or a property is not accepted.
            InvalidDelay: The due time or the delay is not accepted.
            AlreadyPending: A message with the unique key is pending. The error has its id, number and due time.
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
        message = build_message(
            topic, body, tag, keys, properties, message_id, after, at, zone, unique_key=unique_key,
            on_pending=on_pending,
            expires_at=None if expires_at is None else due_ms(expires_at, "expires_at"),
            expires_in=None if expires_in is None else f"{delay_ms(expires_in, 'expires_in')}ms",
            on_expiry=on_expiry, window=None if window is None else f"{delay_ms(window, 'window')}ms", spread=spread,
        )  # fmt: skip
        return self._drive(HttpSender(self._operations).send(message, retry=retry, if_settled=if_settled))

    def send_many(
        self,
        rows: ArrowColumns | Iterable[Mapping[str, Any]],
        *,
        topic: str | None = None,
        batch_rows: int | None = None,
        window: int = WINDOW,
        on_refused: Literal["raise", "collect"] = "raise",
        retry: bool = False,
        if_settled: IfSettled = "keep",
    ) -> SendSummary:
        """Send many messages in pipelined batches. The broker accepts each batch as a whole or not at all.

        A list of at most 10,000 dicts and 4 MiB is one batch, if all have one topic. A table or a record batch of at
        most 65,536 rows and 4 MiB is one batch. Larger inputs, readers and generators are split into batches of 1,024
        dicts, of 8,192 rows of columns, or of `batch_rows`. The method returns when the broker has answered every
        batch. Columns go over Flight, and dicts over HTTP.

        The columns (or the keys of the dicts) are `topic` and `body`, and optionally `tag`, `keys`, `properties`,
        `unique_key` (the message id), `due_ms`, `delay_ms`, `at` (a timestamp with a time zone) and `after` (a
        duration). Dicts may also have `zone`, as for `send`. Columns may also be `queue_id`, `born_ms` and `flag`.

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
        if is_arrow(rows):
            return self._send_columns(rows, topic, batch_rows, window, collect, retry, if_settled)
        sender, dicts = HttpSender(self._operations), cast(Iterable[Mapping[str, Any]], rows)
        return self._drive(sender.send_many(dicts, topic, batch_rows, collect, retry, if_settled))

    def _send_columns(self, rows: Any, *options: Any) -> SendSummary:
        """Send columns over Flight. `options`: the other arguments of `send_columns`, in its order."""
        columns = self._columns("send_many of a table")
        from timeball.client.sender import send_columns  # needs pyarrow

        return send_columns(columns, self._clock, rows, *options)

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
        return self._operations.run(http_codec.get(id, topic))

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
        return self._cancel_or_reschedule("cancel", http_codec.cancel, id, key, ids)

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
        operation = partial(http_codec.reschedule, due_ms=due_ms, delay_ms=delay_ms)
        return self._cancel_or_reschedule("reschedule", operation, id, key, ids)

    def _cancel_or_reschedule(
        self,
        verb: str,
        operation: Callable[[list[str], list[str]], http_codec.Operation[list[Verdict]]],
        id: str | None,
        key: str | None,
        ids: Iterable[str] | None,
    ) -> Verdict | list[Verdict]:
        """Run an operation for exactly one of `id`, `key` and `ids`. Raises RequestError if not exactly one is given.

        `operation` builds a request from ids and keys. Many ids are divided into requests. `verb`: for the error text.
        """
        if sum(name is not None for name in (id, key, ids)) != 1:
            raise RequestError(f"{verb} by one of: id, key=, ids=")
        calls = self._operations

        async def run_all() -> Verdict | list[Verdict]:
            """Return the verdict for `id`, or a list of verdicts for `key` and `ids`."""
            if id is not None:
                return (await calls.run_async(operation([id], [])))[0]
            if key is not None:
                return await calls.run_async(operation([], [key]))
            all_ids, verdicts = http_codec.listed("ids", ids or ()), list[Verdict]()
            for begin in range(0, len(all_ids), limits.CANCELS_PER_REQUEST_MAX):
                chunk = all_ids[begin : begin + limits.CANCELS_PER_REQUEST_MAX]
                part = await calls.run_async(operation(chunk, []))
                verdicts += part
            return verdicts

        return self._drive(run_all())

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

        >>> with Timeball(endpoint, flight=flight_endpoint) as ball:
        ...     seq = ball.send("audit", "x").seq
        ...     ball.read_log(seq, seq + 1).read_all().column("topic").to_pylist()
        ['audit']
        """
        return self._columns("read_log").stream(
            wire.ReadLog(
                from_seq=from_seq,
                to_seq=to_seq,
                kinds=None if kinds is None else [int(kind) for kind in kinds],
                columns=None if columns is None else http_codec.listed("columns", columns),
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
        import pyarrow as pa  # only for columns

        calls = self._columns("read_queue")
        batch = calls.rows(wire.ReadQueue(topic=topic, queue_id=queue_id, offset=offset, rows=rows))
        return pa.RecordBatchReader.from_batches(batch.schema, [batch])

    # ---- administration ---------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Read the broker's state: its version, the number of pending messages, lateness and more.

        docs/flight.md describes the fields.
        """
        return self._operations.run(http_codec.read_status())

    def topics(self) -> dict[str, int]:
        """List all topics with their numbers of queues."""
        return self._operations.run(http_codec.list_topics())

    def groups(self, group: str | None = None) -> list[GroupState]:
        """List all consumer groups, or read one: its lag, its messages in flight and its dead letters.

        Args:
            group: The name of one group. The default is all groups, ordered by name.

        Raises:
            GroupNotFound: The group does not exist.
        """
        if group is not None:
            return self._operations.run(http_codec.read_group(group))
        return self._drive(self._operations.read_pages(http_codec.list_groups))

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
        return self._operations.run(http_codec.list_dead_letters(group, max_messages, after))

    def resend_dead_letters(
        self,
        group: str,
        dead_letters: Sequence[str] | None = None,
        *,
        after: After | None = None,
        rate: float | None = None,
        where: str = "",
    ) -> Resolved:
        """Deliver dead letters to their group again, with their attempts counted from 0. Durable on return.

        Args:
            group: The name of the group.
            dead_letters: The handles of at most 1,000 dead letters (`DeadLetterRow.dead_letter`). The default is all
                that are left.
            after: The delay until the first one is delivered. The default is none.
            rate: How many are delivered in a second. The default is all at once.
            where: An SQL condition, such as "attempts > 3 AND topic = 'orders'". Of all dead
                letters, those that meet it are resent. Not together with `dead_letters`.

        Returns:
            The number of dead letters that were resent, and for each given handle whether the dead letter was found.
        """
        handles = None if dead_letters is None else http_codec.listed("dead_letters", dead_letters)
        after_text = None if after is None else f"{delay_ms(after)}ms"
        return self._operations.run(
            http_codec.resolve_dead_letters(group, "resend", handles, after_text, rate, where)
        )

    def delete_dead_letters(self, group: str, dead_letters: Sequence[str] | None = None) -> Resolved:
        """Delete dead letters, so that the group does not receive them again. Durable on return.

        Args:
            group: The name of the group.
            dead_letters: The handles of at most 1,000 dead letters (`DeadLetterRow.dead_letter`). The default is all
                that are left.

        Returns:
            The number of dead letters that were deleted, and for each given handle whether the dead letter was found.
        """
        handles = None if dead_letters is None else http_codec.listed("dead_letters", dead_letters)
        return self._operations.run(http_codec.resolve_dead_letters(group, "delete", handles))

    def limit_group(self, group: str, *, max_per_key: int) -> None:
        """Limit the messages with the same key that members of a consumer group may hold at a time. Durable on return.

        Args:
            group: The name. The group is created if it does not exist.
            max_per_key: The limit, up to 10,000. With 1, the messages of a key are handled one after another. 0 for no
                limit.

        Raises:
            OutOfRange: The limit is too large.
        """
        return self._operations.run(http_codec.limit_group(group, max_per_key))

    def create_topic(
        self,
        topic: str,
        queues: int | None = 8,
        *,
        on_pending: OnPending | None = None,
        max_per_second: int | None = None,
    ) -> None:
        """Create a topic, or add queues to one that has fewer. Durable on return.

        Unless the broker is configured otherwise, the first send to a topic creates it too.

        Args:
            topic: The name, 1 to 127 characters.
            queues: The number of queues, from 1 to 1,024. None for those that it has, or the broker's setting.
            on_pending: The rule for sends with a unique key that name none. Without it, the topic keeps its rule.
            max_per_second: The most messages that become visible to consumers in a second. 0 for no limit. Without it,
                the topic keeps its limit.

        Raises:
            InvalidName: The topic may not have this name.
        """
        return self._operations.run(http_codec.create_topic(topic, queues, on_pending, max_per_second))

    def queues(self, topic: str) -> dict[int, QueueRange]:
        """List the first and the next offset of each queue of a topic. Raises NotFound for an unknown topic."""
        return self._operations.run(http_codec.read_queues(topic))

    @property
    def schedules(self) -> Schedules:
        """The recurring schedules of the broker: put, get, all, pause, resume, delete, run, preview, history.

        Raises:
            RequestError: The client has no address of HTTP.
        """
        from timeball.client.schedules import Schedules  # most programs have none

        return Schedules(self._operations)

    @property
    def selections(self) -> Selections:
        """Bulk operations on the pending messages that meet a condition.

        Raises:
            RequestError: The client has no address of HTTP.
        """
        from timeball.client.selections import Selections  # most programs have none

        return Selections(self._operations)

    # ---- for programs that build the pending table --------------------------------------------------------

    def reserve(self, rows: int) -> int:
        """Reserve `rows` sequence numbers (at most 2^40) for a later bulk attach, and return the first of them."""
        return self._columns("reserve").action("reserve", wire.Reserve(rows=rows), dict[str, int])[
            "first_seq"
        ]

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
        return self._columns("attach").action("attach", attachment, Attached)

    def compact(self) -> Attached | None:
        """Make the broker move the tail of its log to the pending table now.

        Returns the new version and watermark of the table, or None if no row was added to the log since the last
        compaction. Raises RequestError if the broker's strategy is not `hour_log`.
        """
        answer = self._columns("compact").action("compact", wire.Nothing(), dict[str, Any])
        return Attached(**answer) if answer else None

    def lease_compaction(self, lease_ms: int) -> None:
        """Announce an outside compactor: for `lease_ms` milliseconds the broker does not compact by itself.

        At most an hour counts. 0 ends the lease.
        """
        self._columns("lease_compaction").action("compactor", wire.Lease(lease_ms=lease_ms), dict[str, Any])


def _recreate(
    endpoint: str,
    flight: str | None,
    timeout_ms: int,
    access_key: str | None,
    secret_key: str | None,
    tls_roots: bytes | None,
) -> Timeball:
    """Create a copy of a pickled client from its arguments. Pickle calls this in the process that loads the copy."""
    return Timeball(
        endpoint,
        flight=flight,
        timeout_ms=timeout_ms,
        access_key=access_key,
        secret_key=secret_key,
        tls_roots=tls_roots,
    )
