"""A scenario of the log for crash tests, a witness of the acknowledged rows, and a comparison of both.

The scenario appends rows alone and in groups, reserves numbers, rolls over small segments, removes old ones, stops and
opens the log again. `Witness` is outside the simulated machine: it knows what was appended and acknowledged, whatever
the disk has kept.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pyarrow as pa
from tests.crash_files import CrashFiles, PowerCut
from tests.log.small_log import AtOnce, Log, batch, bodies, opened, read_all, reopened

from timeball.model.errors import StorageError
from timeball.model.message import Kind, build_rows

FAR_FUTURE_MS = 1 << 60


@dataclass
class Witness:
    """The appended batches by first sequence number, and those that were acknowledged."""

    asked: dict[int, list[bytes]] = field(default_factory=dict)
    aside: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    acknowledged_to: int = 0
    let_go_below: int = 1

    async def append(self, log: Log, *batches: pa.RecordBatch, span: int | None = None) -> None:
        """Append batches in one go, and note each one when it is acknowledged."""
        scheduled_rows = []
        for rows in batches:
            first_seq, done = log.writer.append(rows, span=span)
            self.asked[first_seq] = bodies([rows])
            length = span or rows.num_rows
            self.aside.update(range(first_seq + rows.num_rows, first_seq + length))
            scheduled_rows.append((first_seq, first_seq + length, done))
        for first_seq, next_seq, done in scheduled_rows:
            await done
            self.acknowledged.add(first_seq)
            self.acknowledged_to = next_seq

    def let_go(self, files: CrashFiles, log: Log) -> None:
        """Retention: all segments but the last may go."""
        expired = log.segments.expired(
            now_ms=FAR_FUTURE_MS, retention_ms=0, needed_from_seq=log.segments.last.first_seq
        )
        assert expired, "the scenario is too small"
        self.let_go_below = expired[-1].next_seq
        log.segments.remove(files, expired)


async def scenario(files: CrashFiles, witness: Witness) -> None:
    """Two runs of a log."""
    reserve = build_rows(1, kind=int(Kind.TABLE), body=b"10")
    async with opened(files, disk=AtOnce()) as log:
        for n in range(5):
            await witness.append(log, batch(100 * n + 1, 3, body_bytes=200))
            await witness.append(log, *[batch(100 * n + 11 * k, k, body_bytes=50) for k in (1, 2, 3)])
        await witness.append(log, reserve, span=11)
        assert log.segments.all[1:], "the scenario is too small"
        witness.let_go(files, log)
        await witness.append(log, batch(1_000, 2), batch(1_100, 20, body_bytes=1_000))
        await witness.append(log, batch(1_200, 1))
    async with opened(files, disk=AtOnce(), durable_before_seq=witness.acknowledged_to) as log:
        await witness.append(log, batch(1_300, 4, body_bytes=700))
        await witness.append(log, batch(1_400, 4, body_bytes=700))


def live(files: CrashFiles) -> Witness:
    """Run the scenario until its end or until the power cut."""
    witness = Witness()
    try:
        asyncio.run(scenario(files, witness))
    except (PowerCut, StorageError):
        assert files.cut, "only a power cut may end it"
    return witness


def violations(files: CrashFiles, witness: Witness, *, durable_before_seq: int = 0) -> list[str]:
    """Open the log that a crash has left and compare it with the witness. Empty if there is no violation."""
    try:
        segments = reopened(files, durable_before_seq=durable_before_seq).segments
        kept_bodies = read_all(segments)
    except StorageError as error:
        return [f"refused: {error}"]
    wrong = []
    for first_seq, expected in witness.asked.items():
        there = [kept_bodies.get(first_seq + i) for i in range(len(expected))]
        is_owed = first_seq in witness.acknowledged and first_seq >= witness.let_go_below
        if there != expected and (is_owed or there != [None] * len(expected)):
            wrong.append(f"{'acknowledged' if is_owed else 'not acknowledged'} {first_seq}: {there}")
    known = {first_seq + i for first_seq, rows in witness.asked.items() for i in range(len(rows))}
    wrong += [f"nobody appended {seq}" for seq in kept_bodies.keys() - known]
    dense = set(range(segments.first_seq, segments.next_seq)) - witness.aside
    wrong += [f"hole at {seq}" for seq in dense - kept_bodies.keys()]
    if segments.first_seq > witness.let_go_below:
        wrong.append(f"begins with {segments.first_seq}, but {witness.let_go_below} may still be needed")
    return wrong


def goes_on(files: CrashFiles) -> list[str]:
    """Append to a recovered log, cut the power again, and check that all rows are there."""
    before = read_all(reopened(files).segments)
    rows = batch(9_000, 5, body_bytes=300)

    async def append() -> int:
        async with opened(files, disk=AtOnce()) as log:
            return (await log.append(rows))[0]

    first_seq = asyncio.run(append())
    after = read_all(reopened(files.crash(survival="nothing")).segments)
    expected = before | {first_seq + i: body for i, body in enumerate(bodies([rows]))}
    return [] if after == expected else [f"appended at {first_seq}, found {sorted(after)}"]
