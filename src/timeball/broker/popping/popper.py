"""The verbs of POP: hand out, take receipts, give more time. And to take for those who promise (../receiving/).

All decisions are made on the event loop between two awaits, so no lock is taken and no position is handed out
twice while it is in hand. Rows are read afterwards; when that fails, the positions have come back at once. What is
in hand is bounded: a queue gives no more until something comes back, and what a group holds for long is put into
the log as a promise instead of being kept here.

In order, a queue gives nothing while any of its messages is in hand, and what comes back is the next to be given,
counted; nothing goes to the retry topic. Otherwise what comes back goes there, or to the dead letters (returning.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from timeball import limits
from timeball.broker import retry
from timeball.broker.filters import Filter
from timeball.broker.filters.filter import BoolArray
from timeball.broker.parts import in_thread
from timeball.broker.popping.copies import is_of, retry_topic
from timeball.broker.popping.lines import Lines
from timeball.broker.popping.returning import Returning
from timeball.broker.popping.taking import Taking
from timeball.broker.popping.window import NO_RECEIPT, Held, Window
from timeball.broker.popping.windows import Windows
from timeball.broker.rates import Stat, of_group
from timeball.broker.receipts import PositionReceipt
from timeball.broker.registry.topics import Topic, check_name, check_topic
from timeball.errors import OutOfRange
from timeball.message import READ_SCHEMA, Int64Array

if TYPE_CHECKING:
    from timeball.broker.service import Broker

_NOTHING = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # once: it takes a third of a millisecond to make
RETRY_TURN = 5  # every fifth pop looks at the retry topic first: RocketMQ's popFromRetryProbability of 20 %


Receipt = PositionReceipt


@dataclass(frozen=True, slots=True)
class Ask:
    """What a consumer wants. `queue_id` -1: of any queue. `from_max`: where a group begins that is new here.

    `attempt_id`: in order, whoever asks again with the same one gets again what may not have reached it.
    """

    group: str
    topic: str
    queue_id: int = -1
    rows: int = 32
    invisible_ms: int = 60_000
    wanted: Filter | None = None
    from_max: bool = False
    in_order: bool = False
    attempt_id: str = ""


@dataclass(frozen=True, slots=True)
class Popped:
    """Rows in hand (READ_SCHEMA), `times` each has been in hand before in order, and what makes their receipts."""

    rows: pa.RecordBatch
    pop_ms: int
    times: list[int] = field(default_factory=list)
    rest: int = 0  # about how many rows the queues asked for still hold

    def receipts(self, group: str) -> list[Receipt]:
        """One a row."""
        names = ("topic", "queue_id", "queue_offset")
        columns = [self.rows.column(name).to_pylist() for name in names]
        return [Receipt(group, t, q, o, self.pop_ms) for t, q, o in zip(*columns, strict=True)]


class Popper:
    """See the module. Belongs to the event loop; `close` ends its task."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self._parts = broker, broker.parts
        self.windows = Windows(broker.parts)
        self._returning = Returning(broker, self.windows)
        self._started_ms = broker.parts.clock.now_ms()
        for window in self.windows.all():
            for offset, held in window.held.items():
                self._returning.expect(window, [offset], held.pop_ms, held.deadline_ms)
        self._turn = itertools.count()
        self._lines = Lines()

    async def close(self) -> None:
        """End. What is in hand stays so: whoever opens these files next takes its receipts."""
        await self._returning.close()
        if self._parts.writer.failed is None:
            await self._parts.writer.flushed()  # what is on its way to the log is done, and not in hand
            self.windows.save()

    def wake(self) -> None:
        """Look at the clock now."""
        self._returning.wake()

    # -- handing out -------------------------------------------------------------------------------------------

    def check(self, ask: Ask) -> None:
        """Raise OutOfRange, InvalidName, NotFound, Forbidden for what this consumer may not ask for."""
        check(ask)
        self._broker.policy.check_group(ask.group)
        self._broker.policy.readable(ask.topic)

    async def pop(self, ask: Ask, wait_ms: int) -> Popped:
        """Up to `ask.rows` rows; waits up to `wait_ms` for the first. Raises NotFound, OutOfRange, OverLimit."""
        self.check(ask)
        deadline_s = until_s(wait_ms)
        popped = await self._look(ask)
        if popped.rows.num_rows or wait_ms <= 0:
            return popped
        async with self._lines.turn(ask, deadline_s) as has_turn:
            while has_turn:
                popped = await self._look(ask)
                if popped.rows.num_rows or not await self._something(ask, deadline_s):
                    break
        return popped

    async def _look(self, ask: Ask) -> Popped:
        while True:
            popped, unseen = await self._pop_now(ask)
            if popped.rows.num_rows or not unseen:
                return popped
            await asyncio.sleep(0)  # the filter passes few: others get their turn between two looks

    async def _something(self, ask: Ask, deadline_s: float) -> bool:
        """Wait for news; false when the time is up."""
        left_s = deadline_s - asyncio.get_running_loop().time()
        return left_s > 0 and await self._broker.waiters.wait_any(_topics_of(ask), left_s)

    async def wait_for_some(self, ask: Ask, wait_ms: int) -> bool:
        """Whether a pop would find rows, filters aside; waits up to `wait_ms` for that and takes nothing."""
        self.check(ask)
        deadline_s = until_s(wait_ms)
        while True:
            for window, topic in self._open_windows(ask):
                has_some = window.again or window.next_offset < topic.queues[window.queue_id].index.max_offset
                if has_some and not (ask.in_order and window.held):
                    return True
            if not await self._something(ask, deadline_s):
                return False

    def _open_windows(self, ask: Ask) -> list[tuple[Window, Topic]]:
        """The group's windows this pop may take from, in the order of taking."""
        turn = next(self._turn)
        names = _topics_of(ask)
        found = []
        for name in reversed(names) if turn % RETRY_TURN == 0 else names:
            is_main = name == ask.topic
            topic = self._parts.topics.get(name) if is_main else self._parts.topics.find(name)
            if topic is None:
                continue
            count = topic.read_queues
            if is_main and ask.queue_id >= count:
                raise OutOfRange(f"queue {ask.queue_id}: topic {name!r} has {count}")
            ids = [ask.queue_id] if is_main and ask.queue_id >= 0 else range(count)
            windows = [self.windows.open(ask.group, topic, i, from_max=ask.from_max and is_main) for i in ids]
            for window in windows:
                if window.again:
                    window.let_go(self._parts.reader.first_seq)
            first = turn % max(1, len(windows))
            found += [(window, topic) for window in windows[first:] + windows[:first]]
        return found

    def _take_now(self, ask: Ask) -> tuple[Taking, list[Window], int]:
        """Take what there is now; from which windows, and about how many rows they still hold."""
        windows, now_ms = self._open_windows(ask), self._parts.clock.now_ms()
        pop_ms = now_ms
        if ask.in_order:
            # Positions are handed out again here, and an old receipt must not pass for the new one.
            pop_ms = max(now_ms, 1 + max((window.last_pop_ms for window, _ in windows), default=0))
        taking = Taking(
            max(0, min(ask.rows, self.windows.room)), pop_ms, now_ms + ask.invisible_ms,
            in_order=ask.in_order, attempt_id=ask.attempt_id,
        )  # fmt: skip
        rest = 0
        for window, topic in windows:
            index = topic.queues[window.queue_id].index
            # A copy in the retry topic has been wanted once.
            taking.take(window, index, ask.wanted if topic.name == ask.topic else None)
            rest += index.max_offset - window.next_offset
        return taking, [window for window, _ in windows], rest

    async def _pop_now(self, ask: Ask) -> tuple[Popped, bool]:
        """What there is now; and whether there is more that nobody has looked at."""
        taking, windows, rest = self._take_now(ask)
        pop_ms = taking.pop_ms
        for window, offsets in taking.offsets().items():
            self._returning.expect(window, offsets, pop_ms, taking.deadline_ms)
        keep = np.ones(len(taking.found), dtype=np.bool_)
        rows = _NOTHING
        if taking.found:
            rows, keep = await self._read(ask, taking)
        for (window, offset, _), is_wanted in zip(taking.found, keep.tolist(), strict=True):
            if not is_wanted and window.find(offset, pop_ms):
                window.done(offset)
        self._store(windows)
        times = [held.times for (_, _, held), is_wanted in zip(taking.found, keep, strict=True) if is_wanted]
        rows = rows if keep.all() else rows.filter(pa.array(keep))
        sizes = [
            held.size_bytes for (_, _, held), is_wanted in zip(taking.found, keep, strict=True) if is_wanted
        ]
        self._parts.rates.got(ask.topic, ask.group, rows.num_rows, sum(sizes))
        return Popped(rows, pop_ms, times, rest), taking.unseen or not keep.all()

    async def _read(self, ask: Ask, taking: Taking) -> tuple[pa.RecordBatch, BoolArray]:
        try:
            return await in_thread(self._parts.reader_thread, self.read_rows, ask, taking.seqs)
        except BaseException:  # also a consumer that has gone away: nobody has seen these rows
            self.give_up(taking)
            raise

    def read_rows(self, ask: Ask, seqs: Int64Array) -> tuple[pa.RecordBatch, BoolArray]:
        """The rows, and which of them the consumer is to have (reader thread)."""
        rows = self._parts.reader.take(seqs)
        keep = np.ones(len(seqs), dtype=np.bool_)
        main = np.array([name == ask.topic for name in rows.column("topic").to_pylist()])
        if ask.wanted is not None and not ask.wanted.matches_all:
            keep &= ~main | ask.wanted.exact(rows)
        texts = rows.column("properties")
        for at in np.flatnonzero(~main).tolist():
            keep[at] = is_of(ask.group, texts[at].as_py())
        return rows, keep

    # -- handing out what is promised at once (../receiving/) ---------------------------------------------------

    async def take(self, ask: Ask, deadline_s: float) -> Taking:
        """Positions whose rows the caller is to read, to `finish` or to `give_up`; until then nobody else gets them.

        Waits until `deadline_s` on the loop's clock for the first. No deadline brings them back.
        """
        taking = self._take(ask)
        if taking.found or taking.unseen:
            return taking
        async with self._lines.turn(ask, deadline_s) as has_turn:
            while has_turn:
                taking = self._take(ask)
                if taking.found or taking.unseen or not await self._something(ask, deadline_s):
                    break
        return taking

    def _take(self, ask: Ask) -> Taking:
        taking, windows, _ = self._take_now(ask)
        taking.pop_ms = NO_RECEIPT  # no receipt of ours is for these
        for _, _, held in taking.found:
            held.pop_ms = NO_RECEIPT
        self._store(windows)
        return taking

    def leave_out(self, taking: Taking, keep: BoolArray) -> None:
        """Of what was taken nobody wants those that are not to be kept."""
        found = list(zip(taking.found, keep.tolist(), strict=True))
        self._finish([one for one, is_wanted in found if not is_wanted])
        taking.found = [one for one, is_wanted in found if is_wanted]

    def finish(self, taking: Taking) -> None:
        """What was taken is done: other rows of the log stand for it."""
        for window in taking.offsets():
            window.promised = True
        self._finish(taking.found)

    def _finish(self, found: list[tuple[Window, int, Held]]) -> None:
        windows = {window: window.open_rows >= limits.POP_HELD_PER_QUEUE_MAX for window, _, _ in found}
        for window, offset, held in found:
            if window.held.get(offset) is held:
                window.done(offset)
        self._store(windows)
        self._broker.waiters.wake({window.topic for window, was_full in windows.items() if was_full})

    def give_up(self, taking: Taking) -> None:
        """Nobody has seen what was taken: it is the next to be handed out."""
        for window, offset, held in taking.found:
            if window.find(offset, taking.pop_ms) is held:
                window.give_back(offset)
        self._broker.waiters.wake({window.topic for window, _, _ in taking.found})

    # -- receipts ----------------------------------------------------------------------------------------------

    def ack(self, receipts: Iterable[Receipt]) -> list[bool]:
        """These are done with; false for a receipt that is not valid (any more)."""
        verdicts: list[bool] = []
        touched: dict[Window, bool] = {}
        for receipt in receipts:
            found = self._find(receipt)
            if found is not None:
                window, _ = found
                touched.setdefault(window, window.open_rows >= limits.POP_HELD_PER_QUEUE_MAX)
                window.done(receipt.offset)
            verdicts.append(found is not None or self._finish_ahead(receipt))
            if verdicts[-1]:
                self._parts.rates.add(Stat.GROUP_ACK_NUMS, of_group(receipt.topic, receipt.group), 1)
        self._store(touched)
        # Whoever waits for a queue in order, or for one that gave no more, waits for this.
        self._broker.waiters.wake({w.topic for w, was_full in touched.items() if was_full or not w.held})
        return verdicts

    async def change_invisible(self, receipt: Receipt, invisible_ms: int) -> Receipt | None:
        """Invisible until `invisible_ms` from now; the new receipt, or None when the old one is not valid.

        In order the receipt stays as it is, as in RocketMQ, whose clients go on using it.
        """
        check_invisible(invisible_ms, 0)
        found = self._find(receipt)
        if found is None:
            return None
        window, held = found
        now_ms = self._parts.clock.now_ms()
        held.deadline_ms = now_ms + invisible_ms
        if not held.in_order:
            held.pop_ms = max(now_ms, receipt.pop_ms + 1)
        changed = receipt._replace(pop_ms=held.pop_ms)
        if not held.in_order and window.open_rows > limits.POP_HELD_PER_QUEUE_MAX // 2:
            await self._returning.send_back(window, [receipt.offset], later=True)
        else:
            self._returning.expect(window, [receipt.offset], held.pop_ms, held.deadline_ms)
        return changed

    def give_back(self, receipts: Iterable[Receipt]) -> None:
        """Nobody has seen these: their consumer was gone before the answer. They are the next to be handed out."""
        topics = set()
        for receipt in receipts:
            found = self._find(receipt)
            if found is not None:
                found[0].give_back(receipt.offset)
                topics.add(receipt.topic)
        self._broker.waiters.wake(topics)

    async def dead_letter(self, receipt: Receipt) -> bool:
        """Put the message into the group's dead letters now; false when the receipt is not valid."""
        found = self._find(receipt)
        if found is not None:
            await self._returning.send_back(found[0], [receipt.offset], dead=True)
        return found is not None

    def _find(self, receipt: Receipt) -> tuple[Window, Held] | None:
        window = self.windows.find(receipt.group, receipt.topic, receipt.queue_id)
        held = window.find(receipt.offset, receipt.pop_ms) if window is not None else None
        return (window, held) if window is not None and held is not None else None

    def _finish_ahead(self, receipt: Receipt) -> bool:
        """A consumer that has worked through a restart of ours need not do so again."""
        topic = self._parts.topics.find(receipt.topic)
        stored = self._parts.offsets.find(receipt.group, receipt.topic, receipt.queue_id)
        if topic is None or stored is None or not 0 <= receipt.pop_ms < self._started_ms:
            return False
        window = self.windows.open(receipt.group, topic, receipt.queue_id, from_max=False)
        return self.windows.finish_ahead(window, topic.queues[receipt.queue_id].index, receipt.offset)

    def _store(self, windows: Iterable[Window]) -> None:
        for window in windows:
            if self.windows.store(window):
                self._returning.stretched(window)


def _topics_of(ask: Ask) -> list[str]:
    """The topic and, unless in order, the one its retries go to."""
    again = retry_topic(ask.group, ask.topic)
    return [ask.topic] if ask.in_order or again == ask.topic else [ask.topic, again]


def until_s(wait_ms: int) -> float:
    """When a wait of so long is over, on the loop's clock."""
    return asyncio.get_running_loop().time() + min(wait_ms, limits.PULL_WAIT_MS_MAX) / 1000


def left_ms(deadline_s: float) -> int:
    """How long it is until then."""
    return max(0, round(1000 * (deadline_s - asyncio.get_running_loop().time())))


def check(ask: Ask) -> None:
    """Raise OutOfRange, InvalidName for what cannot be asked."""
    check_name(ask.group, limits.GROUP_BYTES_MAX, "group")
    if not 1 <= ask.rows <= limits.POP_ROWS_MAX:
        raise OutOfRange(f"rows {ask.rows}: between 1 and {limits.POP_ROWS_MAX}")
    if ask.queue_id < -1:
        raise OutOfRange(f"queue {ask.queue_id}: -1 (any) or one that the topic has")
    check_invisible(ask.invisible_ms, 1)
    # Where the copies go must be a topic's name, and this is the time to say so.
    for name in (ask.topic, *_topics_of(ask), retry.dead_letter_topic(ask.group)):
        check_topic(name)


def check_invisible(invisible_ms: int, least_ms: int) -> None:
    """Raise OutOfRange unless a message may be away for so long."""
    if not least_ms <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise OutOfRange(f"invisible for {invisible_ms} ms: between {least_ms} and {limits.INVISIBLE_MS_MAX}")
