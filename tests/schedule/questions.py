"""A random walk over a backlog alone, through the core operations of its interface (schedule/backlog.py).

    every message is opened before it is due, or bounds `first_due_ms` · no message is opened twice, unless it was
    rewritten meanwhile · `first_due_ms` is never after an unopened message · no row below `needed_seq` is needed · a
    restart from any state, with the later messages, loses no unsettled message

A `Walk` calls the operations in random order and plays the scheduler: it settles opened messages, and rewrites those
that must be rewritten. A backlog joins with one class.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.rounds import rounds
from tests.schedule.readback import column
from tests.schedule.stage import Restart, Rig
from tests.schedule.world import World

from timeball.model import limits
from timeball.model.message import Kind, build_rows, int64
from timeball.schedule.backlog import Opened, Rewritten
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.locations import NOTHING, Waiting
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes

STEPS, SEEDS = 120, 6
DISTANCES_MS = (0, 1, 999, 5_000, 9_999, 12_000, 61_000, 200_000, limits.HOUR_MS, 5 * limits.HOUR_MS)


class Walk:
    """A backlog and a model of it."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.chance, self.rig = random.Random(seed), rig
        self.world = World(rig)  # for its log, files, clock and reader thread
        self.due: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.opened: set[int] = set()  # neither settled nor rewritten since
        self.settled: set[int] = set()
        self.saved: tuple[object, int] = (None, 1)  # a saved state, and the end of the log at that time
        self.build(None, 1)

    # -- what the scheduler does -------------------------------------------------------------------------

    def build(self, state: object, saved_seq: int) -> None:
        """Restart with the state in a checkpoint and the later log."""
        self.outcomes = Outcomes()
        self.outcomes.restore(NOTHING_SETTLED)
        settled_seqs = sorted(self.settled)
        self.outcomes.add_settled(column(map(self.due.__getitem__, settled_seqs)), column(settled_seqs))
        unsettled = sorted(self.due.keys() - self.settled)
        since = [seq for seq in unsettled if self.row[seq] >= saved_seq]
        restart = Restart(state=state, since=self.waiting(since), waiting=self.waiting(unsettled))
        built = self.rig.build(self.world, restart, self.outcomes)
        self.backlog: Any = built.backlog
        self.opened = set()
        self.check_opened(
            self.backlog.restore(built.state, NOTHING_SETTLED, built.waiting, self.world.now_ms)
        )

    def waiting(self, seqs: list[int]) -> Waiting:
        due, row = (column(map(by_seq.__getitem__, seqs)) for by_seq in (self.due, self.row))
        return Waiting(due, column(seqs), row) if seqs else NOTHING

    def check_opened(self, opened: Opened) -> None:
        seqs = opened.seq.tolist()
        assert len(set(seqs)) == len(seqs), "opened twice in one call"
        unsettled_seqs = {seq for seq in seqs if seq not in self.settled}
        assert not unsettled_seqs & self.opened, f"opened twice: {sorted(unsettled_seqs & self.opened)}"
        assert unsettled_seqs <= self.due.keys(), "never added"
        assert all(self.due[seq] == due for seq, due in zip(seqs, opened.due_ms.tolist(), strict=True))
        self.opened |= unsettled_seqs
        to_rewrite = opened.part(opened.rewrites & np.isin(opened.seq, column(unsettled_seqs)))
        if len(to_rewrite):
            self.rewrite(to_rewrite)

    def rewrite(self, scheduled_rows: Opened) -> None:
        """Append new rows of these messages. With some probability, restart before or after they are durable."""
        if self.chance.random() < 0.3:
            return self.restart()
        first_seq = self.append(len(scheduled_rows))
        rows = np.arange(first_seq, first_seq + len(scheduled_rows))
        self.row |= dict(zip(scheduled_rows.seq.tolist(), rows.tolist(), strict=True))
        self.opened -= set(scheduled_rows.seq.tolist())
        if self.chance.random() < 0.2:
            return self.restart()  # durable, but the broker was not notified
        rewritten = Waiting(scheduled_rows.due_ms, scheduled_rows.seq, rows)
        near = self.backlog.add(
            rewritten, self.world.now_ms, Rewritten(scheduled_rows.row_seq, scheduled_rows.note)
        )
        self.opened |= set(scheduled_rows.seq[near].tolist())
        return None

    def append(self, count: int) -> int:
        """Append rows of which only the numbers matter. Returns the first number."""
        rows = build_rows(
            count, kind=int(Kind.MOVED), topic="t", queue_id=-1, store_ms=self.world.now_ms, source_seq=1
        )

        async def append() -> int:
            return await self.world.writer.append(rows)[1]

        return self.world.run(append())

    # -- the steps ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        steps = [self.add, self.add, self.open, self.open, self.settle, self.advance, self.save, self.restart]
        self.chance.choice(steps)()
        self.check()

    def add(self) -> None:
        due_times = [
            self.world.now_ms + self.chance.choice(DISTANCES_MS) for _ in range(self.chance.randint(1, 12))
        ]
        rows = build_rows(
            len(due_times),
            kind=int(Kind.SCHEDULED),
            topic="t",
            queue_id=-1,
            store_ms=self.world.now_ms,
            due_ms=due_times,
        )
        rows, seqs = self.rig.encode(rows, self.backlog), list[int]()

        async def append() -> None:
            first_seq, durable = self.world.writer.append(rows)
            await durable
            seqs.extend(range(first_seq, first_seq + len(due_times)))

        self.world.run(append())
        self.rig.keep(rows, seqs[0])
        self.due |= dict(zip(seqs, int64(rows["due_ms"]).tolist(), strict=True))
        self.row |= dict(zip(seqs, seqs, strict=True))
        near = self.backlog.add(self.waiting(seqs), self.world.now_ms)
        self.opened |= set(np.array(seqs)[near].tolist())

    def open(self) -> None:
        now_ms, ahead_ms = self.world.now_ms, self.rig.ahead_ms
        for _ in range(1_000):
            first_ms = self.backlog.first_due_ms
            if first_ms - ahead_ms // 2 > now_ms:
                break
            results: list[Opened] = []

            async def open_(results: list[Opened] = results) -> None:
                results.append(await self.backlog.open(now_ms, now_ms + ahead_ms))

            self.world.run(open_())
            self.check_opened(results[0])
        else:
            raise AssertionError("the opening does not end")
        overdue = [seq for seq in self.unopened() if self.due[seq] <= now_ms]
        assert not overdue, f"due and not opened: {overdue}"

    def settle(self) -> None:
        settled_seqs = sorted(self.opened)[: self.chance.randint(0, 20)]
        if self.chance.random() < 0.3:  # cancelled before it was opened
            settled_seqs += [seq for seq in self.unopened() if self.chance.random() < 0.2]
        self.outcomes.cancel(column(map(self.due.__getitem__, settled_seqs)), column(settled_seqs))
        self.settled |= set(settled_seqs)
        self.opened -= set(settled_seqs)

    def advance(self) -> None:
        first_ms = self.backlog.first_due_ms
        near_ms = 0 if first_ms == FAR_MS else max(0, first_ms - self.world.now_ms)
        self.world.advance(self.chance.choice([1, 1_000, 9_000, 70_000, near_ms]))

    def save(self) -> None:
        files = self.backlog.files_to_sync()
        state = self.rig.state(self.backlog.state(self.settled_ms))
        self.backlog.rows_synced()
        for _, dirty_files in files:
            for file in dirty_files:
                file.sync()
        self.saved = state, self.world.writer.next_seq

    def restart(self) -> None:
        self.build(*self.saved)

    # -- what holds after each step ----------------------------------------------------------------------

    def unopened(self) -> list[int]:
        return sorted(self.due.keys() - self.opened - self.settled)

    @property
    def settled_ms(self) -> int:
        first_ms = self.backlog.first_due_ms
        due_times = [self.due[seq] for seq in self.opened] + [self.due[seq] for seq in self.unopened()]
        return min([self.world.now_ms, first_ms, *due_times])

    def check(self) -> None:
        first_ms, due_times = self.backlog.first_due_ms, [self.due[seq] for seq in self.unopened()]
        assert not due_times or first_ms <= min(due_times), f"{first_ms} is after {min(due_times)}"
        needed = self.backlog.needed_seq(self.settled_ms)
        if self.rig.has_table:
            assert needed is None, "with a table, the watermark limits the needed rows"
            return
        rows = [self.row[seq] for seq in self.due.keys() - self.settled]
        assert not rows or (needed is not None and needed <= min(rows)), (
            f"{needed} is needed, and so is {min(rows)}"
        )


def walk(new_rig: Callable[[], Rig], seed: int, steps: int = STEPS) -> Walk:
    """Take `steps` random steps. At the end all messages are settled, and the backlog must be empty."""
    walker = Walk(new_rig(), seed)
    with closing(walker.world):
        for _ in range(steps):
            walker.step()
        for _ in range(1_000):
            walker.open()
            walker.settled |= walker.opened
            settled_seqs = sorted(walker.settled)
            walker.outcomes.add_settled(
                column(map(walker.due.__getitem__, settled_seqs)), column(settled_seqs)
            )
            walker.opened.clear()
            first_ms = walker.backlog.first_due_ms
            if first_ms == FAR_MS:
                break
            walker.world.advance(max(0, first_ms - walker.world.now_ms))
        assert not walker.unopened()
        walker.world.advance(limits.DAY_MS)
        assert walker.backlog.needed_seq(walker.world.now_ms) is None, "no message is pending"
    return walker


class Questions:
    """Tests of a backlog alone. It joins with `new_rig`."""

    new_rig: ClassVar[Callable[[], Rig]]

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_random_operations_keep_the_rules_of_a_backlog(self, seed: int) -> None:
        walk(type(self).new_rig, seed)

    @pytest.mark.slow
    @pytest.mark.siege
    @pytest.mark.parametrize("seed", range(SEEDS, rounds(SEEDS + 2, 5 * SEEDS)))
    def test_many_random_operations_keep_the_rules_of_a_backlog(self, seed: int) -> None:
        walk(type(self).new_rig, seed, 4 * STEPS)
