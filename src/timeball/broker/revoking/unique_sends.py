"""Sends with a unique key: at most one message with a topic and a unique key is pending.

    put -> wait for its turn: the sends with one topic and key are carried out one by one, each durable before the next
        -> the pending message with the key: from memory, else by a look-up in log and table
        -> there is none    SCHEDULED (or MESSAGE)           created
           reject           no row                           AlreadyPending names the pending message
           keep             no row                           kept: the answer is the pending message
           replace          CANCEL and SCHEDULED, one frame  replaced: the answer names both messages

The row of a message has the key among its keys, with a prefix. So the log and the table are the only truth, and their
key indexes lead to the message after a restart, on a new leader, after compaction and retention. `_pending_by_name`
only saves look-ups. It has a limited number of entries, and an entry may be dropped at any time.

The decision and the append are one step on the event loop. A message whose release has begun is not pending. So the
release stands in the log before the row of the new message.

A message that a selection has cancelled (registry/selections.py) does not count as pending. The frame of the new
message has its CANCEL row, which otherwise is appended at its due time. Without it, an undo of the selection would make
two messages pending.

A message that a request is moving is neither at its old nor at its new due time, until the row of the move is durable.
`_find_pending` waits for that row before it takes a message as settled.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import cast

import msgspec
import pyarrow as pa

from timeball.broker.accepting.admission import ParsedSends, as_columns
from timeball.broker.accepting.appender import Accepted, Appender, MakeChange, Sent
from timeball.broker.accepting.ingress import HELD_BYTES_MAX, Piece, answer, refuse
from timeball.broker.accepting.tracing import Tracing, traced
from timeball.broker.policy import Policy
from timeball.broker.recurring.successors import Successors
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.selections import reason_of
from timeball.broker.registry.topics import ON_PENDING, Topics
from timeball.broker.revoking.cancel import cancel_columns, cancel_pending, with_changes
from timeball.broker.revoking.scheduled_lookup import (
    Candidate,
    Change,
    LookUps,
    Names,
    Owner,
    due_version_columns,
    is_on_its_way_back,
)
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.answers import CREATED, KEPT, REPLACED, UniqueMessage
from timeball.model.errors import AlreadyPending, InvalidMessage, OverLimit, Unavailable
from timeball.model.message import Kind, build_rows
from timeball.model.send_options import UNIQUE_PREFIX, OnPending, UniqueKey
from timeball.schedule.scheduler import Scheduler

REJECTED = "rejected"
# In place of the row of a kept message, which is not read: the edge returns only the message's number and due time.
_NOT_READ = build_rows(1, kind=int(Kind.SCHEDULED), queue_id=-1)


class UniqueSend(msgspec.Struct, gc=False):
    """A send of one message with a unique key. `batch`: its SEND_COLUMNS, whose `keys` include the unique key.

    `change` builds further rows for its frame. At the end, `answer` is called with the result, or `refuse` with the
    error.
    """

    batch: pa.RecordBatch
    size_bytes: int
    on_pending: OnPending
    caller: Caller
    answer: Callable[[Accepted], None]
    refuse: Callable[[BaseException], None]
    change: MakeChange | None = None


class UniqueSends:
    """The sends with a unique key, from all edges. Belongs to the event loop."""

    def __init__(
        self,
        appender: Appender,
        policy: Policy,
        look_ups: LookUps,
        successors: Successors,
        *,
        clock: SchedulerClock,
        writer: LogWriter,
        topics: Topics,
        scheduler: Scheduler,
        rates: Rates,
        traces: Tracing | None,
    ) -> None:
        """`traces`: records the spans of the appends, if given."""
        self._appender, self._policy, self._look_ups, self._successors = (
            appender, policy, look_ups, successors,
        )  # fmt: skip
        self._clock, self._writer, self._topics, self._scheduler = clock, writer, topics, scheduler
        self._rates, self._append_traced = rates, traced(self._append, traces)
        self.counts = Counter[str](dict.fromkeys((CREATED, KEPT, REPLACED, REJECTED), 0))
        # The sends that wait for their turn, by topic and key. The first of each is under way.
        self._turns: dict[tuple[str, str], deque[UniqueSend]] = {}
        self._held_bytes = self._held_sends = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # By topic and key: the messages that were pending when the key was last used. An entry is complete: no other
        # pending message has the key. The entries that were used last are at the end.
        self._pending_by_name: dict[tuple[str, str], list[Candidate]] = {}
        # The keys with a send under way at the last `forget`: the entry that it writes may lack messages.
        self._incomplete: set[tuple[str, str]] = set()

    def forget(self) -> None:
        """Look up each key again at its next send.

        Call it after an append of messages whose unique keys no send checked.
        """
        self._pending_by_name.clear()
        self._incomplete |= self._turns.keys()

    def put(
        self,
        piece: Piece,
        unique: UniqueKey,
        caller: Caller,
        *,
        change: MakeChange | None = None,
        on_answer: Callable[[Accepted], None] | None = None,
        on_refusal: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Add a send of one message. Later, `on_answer` is called with the result, or `on_refusal` with the error.

        The default of both sends the outcome to the edge of the piece. `change` builds further rows for the frame of
        the message. Raises InvalidMessage, Forbidden and OverLimit.
        """
        if piece.count != 1:
            raise InvalidMessage(
                f"{piece.count} messages with a unique key in one request: send them one by one"
            )
        try:
            batch = as_columns(piece.rows)
        except (pa.ArrowException, UnicodeError, OverflowError) as error:
            raise InvalidMessage(f"not to be stored: {error}") from error
        topic = batch.column("topic")[0].as_py()
        # A copy that returns to a consumer has the keys of its message, and must be accepted at any time.
        if is_on_its_way_back(topic):
            raise InvalidMessage(
                f"topic {topic[:80]!r}: a message that returns to a consumer has no unique key"
            )
        # Decided once: the permission below is for this rule, and the topic's default may change meanwhile.
        on_pending = unique.on_pending or self._default(topic)
        if on_pending == "replace":
            self._policy.allow(caller, Verb.CANCEL, topic=topic)
        # A lone send of any size is accepted, because its edge has limited its size.
        if self._held_sends and (
            self._held_bytes + piece.size_bytes > HELD_BYTES_MAX
            or self._held_sends >= limits.UNIQUE_SENDS_WAITING_MAX
        ):
            raise OverLimit(f"{self._held_sends} sends with a unique key wait; send this one again later")
        piece.first_row = 0
        send = UniqueSend(
            batch, piece.size_bytes, on_pending, caller, on_answer or partial(answer, [piece]),
            on_refusal or partial(refuse, [piece]), change,
        )  # fmt: skip
        self._held_bytes += send.size_bytes
        self._held_sends += 1
        name = (topic, unique.key)
        turns = self._turns.get(name)
        if turns is not None:
            turns.append(send)
            return
        self._turns[name] = deque([send])
        # The loop holds only weak references to tasks.
        self._tasks.add(task := asyncio.ensure_future(self._take_turns(name)))
        task.add_done_callback(self._tasks.discard)

    async def _take_turns(self, name: tuple[str, str]) -> None:
        """Carry out the sends with one topic and key, one after another, and report the outcome of each."""
        turns = self._turns[name]
        while turns:
            send = turns[0]
            try:
                accepted = await self._carry_out(name, send)
            except AlreadyPending as error:
                self.counts[REJECTED] += 1
                send.refuse(error)
            except Exception as error:  # any error: the client waits for an outcome
                self._pending_by_name.pop(name, None)  # the next send looks the key up again
                send.refuse(error)
            else:
                self.counts[accepted.sent.outcome if accepted.sent else CREATED] += 1
                send.answer(accepted)
            if name in self._incomplete:
                self._incomplete.discard(name)
                self._pending_by_name.pop(name, None)
            turns.popleft()
            self._held_bytes -= send.size_bytes
            self._held_sends -= 1
        del self._turns[name]

    async def _carry_out(self, name: tuple[str, str], send: UniqueSend) -> Accepted:
        """Carry out one send as its `on_pending` demands, durably. Raises AlreadyPending, and the errors of a send."""
        # No resume of a campaign moves the messages meanwhile.
        async with self._look_ups.gate.passing():
            pending, changes = await self._find_pending(name), dict[int, Change]()
            if self._look_ups.may_be_selected(pending):
                # Looked up again: to evaluate the conditions of selections, the rows are read at their present places.
                del self._pending_by_name[name]
                changes = await self._look_ups.select(await self._find_pending(name))
                pending = await self._find_pending(name)
            not_cancelled = with_changes(pending, changes)
            if not_cancelled and send.on_pending != "replace":
                # The pending message may come from memory, and no row is written that only a leader can commit.
                await self._look_ups.confirm_lead()
                return self._keep(not_cancelled[-1], send.on_pending, name)
            # No await from `_find_pending` until the append, so that the decision stays true.
            cancelled_by = {
                candidate: change.owner
                for candidate in pending
                if (change := changes.get(candidate.number)) is not None and change.owner is not None
            }
            accepted, durable = self._append_traced(send.batch, send, not_cancelled, cancelled_by)
            await asyncio.wait([durable])
            self._look_ups.count_cancelled_by_name(cancelled_by.values())
        failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
        if failure is not None:
            raise failure
        # Not before: the schedule does not have a message that is not durable, so the message cannot be cancelled.
        self._remember(name, _candidates_of(name, accepted))
        return accepted

    def _default(self, topic: str) -> OnPending:
        """Find the `on_pending` of sends to a topic that do not set it."""
        entry = self._topics.find_topic(topic)
        default = "reject" if entry is None else entry.config.attributes.get(ON_PENDING, "reject")
        return cast(OnPending, default)  # the registry has checked it

    def _keep(self, pending: Candidate, on_pending: OnPending, name: tuple[str, str]) -> Accepted:
        """Build the answer of a send that keeps the message `pending`. Raises AlreadyPending if the send rejects it."""
        message = _unique_message(pending)
        if on_pending == "keep":
            sent = Sent(KEPT, [], message)
            return Accepted(message.seq, 1, self._clock.now_ms(), _NOT_READ, sent)
        topic, key = name
        raise AlreadyPending(
            f"message {message.id!r} with the unique key {key.removeprefix(UNIQUE_PREFIX)!r} is pending in topic "
            f"{topic!r}, due at {message.due_ms}: cancel it, or send with on_pending keep or replace",
            id=message.id, seq=message.seq, due_ms=message.due_ms,
        )  # fmt: skip

    def _append(
        self,
        sends: ParsedSends,
        send: UniqueSend,
        replaced: list[Candidate],
        cancelled_by: dict[Candidate, Owner],
    ) -> tuple[Accepted, asyncio.Future[int]]:
        """Append the message, and in the same frame the CANCEL rows of the pending messages that it replaces.

        `cancelled_by`: further messages that get a CANCEL row, with the selection that has cancelled each. Returns the
        result, which is valid once the future is done without an error: the rows are durable then.
        """
        rows, level, now_ms = self._appender.admit(as_columns(sends))
        self._policy.ensure_topics(rows.column("topic").to_pylist(), send.caller)
        parts = [self._appender.prepare(rows, now_ms, level)]
        # After all steps that may refuse the message or append rows themselves.
        to_cancel = [*cancelled_by, *replaced]
        continuation = None
        if to_cancel:
            was_pending = cancel_pending(to_cancel, scheduler=self._scheduler)
            assert was_pending.all(), "no await since they were pending"
            cancels = [
                cancel_columns([candidate], now_ms, owner.facts.by, reason_of(owner.name))
                for candidate, owner in cancelled_by.items()
            ]
            parts = [*cancels, cancel_columns(replaced, now_ms, send.caller.name, REPLACED), *parts]
            numbers = [candidate.number for candidate in to_cancel]
            continuation = self._successors.after_end(numbers, now_ms)
            self._rates.add_each(Stat.CANCELLED_NUMS, (candidate.topic for candidate in to_cancel))
        first_seq = self._writer.next_seq + len(to_cancel)
        change = None if send.change is None else send.change(first_seq, now_ms)
        if change is not None:
            parts.append(change.rows)
        appended = self._appender.append(pa.concat_batches(parts), continuation=continuation)
        if change is not None:
            change.apply()
        sent = Sent(REPLACED, [], _unique_message(replaced[-1])) if replaced else Sent(CREATED, [])
        # Only the row of the message: the CANCEL rows before it do not belong to the answer.
        message_row = appended.rows.slice(len(to_cancel), 1)
        return Accepted(first_seq, 1, now_ms, message_row, sent), appended.durable

    # -- the pending messages of a key -----------------------------------------------------------------------------

    async def _find_pending(self, name: tuple[str, str]) -> list[Candidate]:
        """Find the pending messages of a key, the newest last. They are pending until the caller's next await.

        There is more than one only if some came without a check of their unique keys: in a bulk write, or from another
        group.
        """
        candidates = self._pending_by_name.get(name)
        if candidates is None:
            candidates = await self._look_up(name)
        settled_versions = set[int]()  # versions that were not pending before the last flush of the log
        while True:
            newest = list(map(self._newest, candidates))
            pending, not_pending = list[Candidate](), set[int]()
            if newest:
                are_pending = self._look_ups.outcomes.are_pending(*due_version_columns(newest)).tolist()
                flags = list(zip(newest, are_pending, strict=True))
                pending = [candidate for candidate, is_pending in flags if is_pending]
                not_pending = {candidate.seq for candidate, is_pending in flags if not is_pending}
            if not_pending <= settled_versions:
                self._remember(name, pending)
                return pending
            # A version that is not pending is settled, or a request is moving the message. After the flush the row of
            # the move is durable, and `_newest` finds the new version.
            settled_versions |= not_pending
            await self._writer.flushed()

    async def _look_up(self, name: tuple[str, str]) -> list[Candidate]:
        """Search log and table for the messages with a topic and key that have not ended, the newest last."""
        topic, key = name
        lookup = await self._look_ups.look_up(Names(keys=[key], topic=topic))
        candidates = [candidate for candidate in lookup.candidates if candidate.number not in lookup.settled]
        candidates.sort(key=lambda candidate: candidate.number)
        # `row` is removed, because it contains the body, and the candidates stay in memory.
        return [msgspec.structs.replace(candidate, row=None) for candidate in candidates]

    def _newest(self, candidate: Candidate) -> Candidate:
        """Copy a candidate with its newest due time and version. The same candidate if it has them."""
        moved_to = self._look_ups.outcomes.moved.newest(candidate.number)
        if moved_to is None or moved_to[1] <= candidate.seq:
            return candidate
        due_ms, version = moved_to
        return msgspec.structs.replace(candidate, due_ms=due_ms, seq=version)

    def _remember(self, name: tuple[str, str], pending: list[Candidate]) -> None:
        """Store the pending messages of a key in `_pending_by_name`, as the entry that was used last."""
        self._pending_by_name.pop(name, None)
        self._pending_by_name[name] = pending
        if len(self._pending_by_name) > limits.UNIQUE_KEYS_KNOWN_MAX:
            del self._pending_by_name[next(iter(self._pending_by_name))]


def _unique_message(candidate: Candidate) -> UniqueMessage:
    """Describe a pending message for an answer or an error."""
    return UniqueMessage(candidate.unique_key or "", candidate.number, candidate.shown_due_ms)


def _candidates_of(name: tuple[str, str], accepted: Accepted) -> list[Candidate]:
    """Build the entry of `_pending_by_name` for a message that was just written. Empty if it was visible at once."""
    columns = ("kind", "queue_offset", "due_ms", "unique_key", "keys")
    row = {column: accepted.stored_rows.column(column)[0].as_py() for column in columns}
    if row["kind"] != Kind.SCHEDULED:
        return []
    topic, key = name
    is_level = row["queue_offset"] is not None
    return [
        Candidate(
            key, accepted.first_seq, accepted.first_seq, row["due_ms"], topic, row["unique_key"], row["keys"],
            accepted.store_ms, is_level,
        )
    ]  # fmt: skip
