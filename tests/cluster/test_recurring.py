"""A schedule in a group whose leaders die, are cut off and hand over: each second has its message, once.

The world of faults is that of broker_simulation.py. Its checker knows the messages that clients have sent, so the
messages of the schedule are taken out for it, and compared here.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter

import msgspec
import pytest
from tests.broker.recurring.schedule_lives import facts_of
from tests.cluster.broker_simulation import STEPS, Client, Simulation
from tests.crash.checker import Outcome
from tests.rounds import rounds

from timeball.broker.registry.schedules import Progress
from timeball.model.access import ANONYMOUS
from timeball.model.message import Kind

NAME, TOPIC, EVERY_MS = "tick", "ticks", 1_000
SEEDS = rounds(8, 50)


class WithSchedule(Simulation):
    """Clients that put one schedule repeatedly, as programs do when they start."""

    is_put = False
    progress: Progress | None = None
    occurrence_rows: set[int]

    def ask(self) -> None:
        super().ask()
        serving = self.leaders()
        if not serving or self.random.random() > 0.2:
            return
        machine = self.random.choice(serving)
        assert machine.node is not None
        broker = machine.node.broker

        async def put() -> None:
            facts = facts_of({"every": "1s"})
            await broker.schedules.put(NAME, facts, ANONYMOUS)
            self.is_put = self.is_put or not machine.files.cut

        self.give(machine, put)

    async def _read(self, client: Client) -> Outcome:
        outcome = await super()._read(client)
        # No await since the log was read. Memory may be ahead of the rows that a majority has.
        schedule = client.broker.tables.schedules.find(NAME)
        self.progress, self.occurrence_rows = None if schedule is None else schedule[1], set()
        reader = client.broker.log.reader
        for rows in client.broker.read_log(reader.first_seq, reader.next_seq, [Kind.SCHEDULED, Kind.META]):
            columns = (rows.column(name).to_pylist() for name in ("seq", "unique_key", "body"))
            for seq, key, body in zip(*columns, strict=True):
                if key == f"occurrence/{NAME}":
                    self.progress = msgspec.json.decode(body, type=Progress)
                elif key.startswith(f"{NAME}."):
                    self.occurrence_rows.add(seq)
        return outcome

    def _compare(self, outcome: Outcome) -> None:
        ticks = {row.place: row for row in self.observed.seen.values() if row.place.topic == TOPIC}
        ticks |= {row.place: row for row in outcome.rows if row.place.topic == TOPIC}
        self._check(Counter(row.key for row in ticks.values()), outcome)
        outcome.rows = [row for row in outcome.rows if row.place.topic != TOPIC]
        outcome.scheduled_rows -= self.occurrence_rows
        outcome.ranges = {queue: ends for queue, ends in outcome.ranges.items() if queue[0] != TOPIC}
        outcome.offsets = {who: offsets for who, offsets in outcome.offsets.items() if who[1] != TOPIC}
        for place in ticks:
            self.observed.seen.pop(place, None)
        for who in [who for who in self.observed.saved_offsets if who[1] == TOPIC]:
            del self.observed.saved_offsets[who]
        super()._compare(outcome)

    def _check(self, delivered: Counter[str], outcome: Outcome) -> None:
        """Add the faults of the schedule's messages to those of the run."""
        if self.progress is None:
            self.broken += ["the schedule is lost"] if self.is_put or delivered else []
            return
        self.broken += [f"doubled: {key} {count} times" for key, count in delivered.items() if count > 1]
        due_ms = sorted(int(key.removeprefix(f"{NAME}.")) for key in delivered)
        last_ms = self.progress.due_ms - EVERY_MS  # of the newest release
        first_ms = due_ms[0] if due_ms else last_ms + EVERY_MS
        missing = set(range(first_ms, last_ms + EVERY_MS, EVERY_MS)) - set(due_ms)
        self.broken += [f"lost: {sorted(missing)[:5]}"] if missing else []
        pending = self.occurrence_rows - set(outcome.settled)
        if pending != {self.progress.number}:
            self.broken.append(f"pending: rows {sorted(pending)[:5]}, and the schedule names {self.progress}")


def run(seed: int, steps: int = STEPS) -> WithSchedule:
    """Run one seed; raises Fault."""
    simulation = WithSchedule(seed)
    logging.disable(logging.CRITICAL)
    try:
        simulation.run(steps)
    finally:
        logging.disable(logging.NOTSET)
        gc.collect()  # frees the disks of the seed
    return simulation


@pytest.mark.parametrize("seed", [2, 3])
def test_each_second_has_one_message_through_changes_of_the_leader(seed: int) -> None:
    simulation = run(seed)
    assert simulation.is_put and len(simulation.epochs) > 1 and simulation.deaths


@pytest.mark.slow
@pytest.mark.siege
def test_many_seeds_lose_and_double_no_occurrence() -> None:
    put = epochs = 0
    for seed in range(2_000, 2_000 + SEEDS):
        simulation = run(seed)
        put, epochs = put + simulation.is_put, epochs + len(simulation.epochs)
    assert put > SEEDS // 2 and epochs > 2 * SEEDS


def test_a_second_without_a_message_is_noticed() -> None:
    simulation = WithSchedule(1)
    simulation.progress, simulation.occurrence_rows, simulation.is_put = None, {7}, True
    simulation._check(Counter(), Outcome())
    assert simulation.broken == ["the schedule is lost"]
    simulation.broken.clear()
    simulation.progress = Progress(0, 3_000, number=7, due_ms=4_000)  # type: ignore[arg-type]
    simulation._check(Counter({"tick.1000": 1, "tick.3000": 2}), Outcome())
    assert [fault.split(":")[0] for fault in simulation.broken] == ["doubled", "lost"]
    simulation.occurrence_rows = {5, 7}
    simulation._check(Counter({"tick.3000": 1}), Outcome(settled=[]))
    assert simulation.broken[-1].startswith("pending")
