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
    """The rows that the scenario appended, and the acknowledged ones."""

    appended: dict[int, list[bytes]] = field(default_factory=dict)  # first seq of a batch -> its bodies
    reserved: set[int] = field(default_factory=set)  # numbers without a row
    acknowledged: set[int] = field(default_factory=set)  # first seqs of the acknowledged batches
    acknowledged_to: int = 0  # the number after the last acknowledged row
    removed_below: int = 1  # retention may have removed the rows before this number

    async def append(self, log: Log, *batches: pa.RecordBatch, span: int | None = None) -> None:
        """Append batches in one iteration of the loop, and record each one when it is acknowledged."""
        calls = []
        for rows in batches:
            first_seq, commit = log.writer.append(rows, span=span)
            self.appended[first_seq] = bodies([rows])
            next_seq = first_seq + (span or rows.num_rows)
            self.reserved.update(range(first_seq + rows.num_rows, next_seq))
            calls.append((first_seq, next_seq, commit))
        for first_seq, next_seq, commit in calls:
            await commit
            self.acknowledged.add(first_seq)
            self.acknowledged_to = next_seq

    def remove_segments(self, files: CrashFiles, log: Log) -> None:
        """Remove all segments but the last, as retention does."""
        expired = log.segments.expired(
            now_ms=FAR_FUTURE_MS, retention_ms=0, needed_from_seq=log.segments.last.first_seq
        )
        assert expired, "the scenario is too small"
        self.removed_below = expired[-1].next_seq
        log.segments.remove(files, expired)


async def scenario(files: CrashFiles, witness: Witness) -> None:
    """Run a log twice: append rows alone and in groups, reserve numbers, roll, and remove segments."""
    reserve = build_rows(1, kind=int(Kind.TABLE), body=b"10")
    async with opened(files, disk=AtOnce()) as log:
        # The numbers of the messages have no meaning, but are all different.
        for hundred in range(0, 500, 100):
            await witness.append(log, batch(hundred + 1, 3, body_bytes=200))
            group = [batch(hundred + 11 * count, count, body_bytes=50) for count in (1, 2, 3)]
            await witness.append(log, *group)
        await witness.append(log, reserve, span=11)
        assert log.segments.all[1:], "the scenario is too small"
        witness.remove_segments(files, log)
        await witness.append(log, batch(1_000, 2), batch(1_100, 20, body_bytes=1_000))
        await witness.append(log, batch(1_200, 1))
    async with opened(files, disk=AtOnce(), durable_before_seq=witness.acknowledged_to) as log:
        await witness.append(log, batch(1_300, 4, body_bytes=700))
        await witness.append(log, batch(1_400, 4, body_bytes=700))


def run_scenario(files: CrashFiles) -> Witness:
    """Run the scenario on these files until its end, or until their power is cut."""
    witness = Witness()
    try:
        asyncio.run(scenario(files, witness))
    except (PowerCut, StorageError):
        assert files.cut, "only a power cut may end it"
    return witness


def violations(files: CrashFiles, witness: Witness, *, durable_before_seq: int = 0) -> list[str]:
    """Open the log that a crash has left, and compare it with the witness. Returns a text for each violation.

    A batch is complete or absent, and an acknowledged one complete.
    """
    try:
        segments = reopened(files, durable_before_seq=durable_before_seq).segments
        kept_bodies = read_all(segments)
    except StorageError as error:
        return [f"refused: {error}"]
    problems = []
    for first_seq, expected in witness.appended.items():
        stored_bodies = [kept_bodies.get(first_seq + row) for row in range(len(expected))]
        must_exist = first_seq in witness.acknowledged and first_seq >= witness.removed_below
        if stored_bodies != expected and (must_exist or stored_bodies != [None] * len(expected)):
            problems.append(
                f"{'acknowledged' if must_exist else 'not acknowledged'} {first_seq}: {stored_bodies}"
            )
    appended_seqs = {
        first_seq + row for first_seq, rows in witness.appended.items() for row in range(len(rows))
    }
    problems += [f"nobody appended {seq}" for seq in kept_bodies.keys() - appended_seqs]
    with_rows = set(range(segments.first_seq, segments.next_seq)) - witness.reserved
    problems += [f"hole at {seq}" for seq in with_rows - kept_bodies.keys()]
    if segments.first_seq > witness.removed_below:
        problems.append(f"begins with {segments.first_seq}, but {witness.removed_below} may still be needed")
    return problems


def problems_after_an_append(files: CrashFiles) -> list[str]:
    """Append to a recovered log, cut the power, and check that the log has the new rows and all rows before."""
    before = read_all(reopened(files).segments)
    rows = batch(9_000, 5, body_bytes=300)

    async def append() -> int:
        async with opened(files, disk=AtOnce()) as log:
            return (await log.append(rows))[0]

    first_seq = asyncio.run(append())
    after = read_all(reopened(files.crash(survival="nothing")).segments)
    expected = before | dict(enumerate(bodies([rows]), first_seq))
    return [] if after == expected else [f"appended at {first_seq}, found {sorted(after)}"]
