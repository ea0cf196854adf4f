"""After an update of tzdata: compute the due times of local times again, before the first release of a start.

    messages     with the property LOCAL_TIME: a MOVED row, as for a reschedule
    schedules    a CANCEL row of the pending occurrence, and its successor, as when a schedule is replaced

Only zones in use whose rules have changed are concerned (registry/zones.py). Without any, nothing is read. Otherwise
the pending messages are read row group by row group, of each only the columns that a search needs. So memory stays
bounded. Bodies are read of the messages that move.

A message of a selection counts as cancelled, and keeps its due time and version: a new version would not belong to the
selection. Its zone keeps the hash of the former rules, so that the next start moves a message whose selection was
undone. An occurrence of a selection is cancelled for good, as at its due time, and its schedule goes on.

Each frame also contains the report so far, and the last frame the new version of tzdata. If a start is interrupted, the
next one continues: messages that have moved are due at the right time already. The broker that leads a cluster decides
by its own tzdata.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.delivery import split_into_frames
from timeball.broker.pending.snapshot import Snapshot, Snapshots
from timeball.broker.policy import Policy
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import Next, Successors, build_cancel_row, first_after, following
from timeball.broker.registry.meta import Change
from timeball.broker.registry.rates import Rates
from timeball.broker.registry.schedules import OCCURRENCE, Progress, Schedules
from timeball.broker.registry.selections import reason_of
from timeball.broker.registry.zones import (
    UTC,
    ZoneFacts,
    ZoneMoves,
    Zones,
    ZoneUpdate,
    ZoneUse,
)
from timeball.broker.revoking.found_rows import COLUMNS, FoundRow, rows_in_files, rows_in_log
from timeball.broker.revoking.reschedule import move_frame, read_slice
from timeball.broker.revoking.scheduled_lookup import (
    Candidate,
    LookUps,
    Names,
    read_scheduled_rows,
)
from timeball.io.clock import SchedulerClock
from timeball.io.threads import SLICE_ROWS, Threads, in_thread
from timeball.log.row_encoder import rows_of
from timeball.log.writer import CommitLog
from timeball.model import time_parsing
from timeball.model.access import Caller, Verb
from timeball.model.answers import LAST_POSITION
from timeball.model.config import Settings
from timeball.model.errors import InvalidDelay, OverLimit
from timeball.model.message import Int64Array, decode_properties
from timeball.model.time_parsing import LOCAL_TIME, local_due_ms, rules_hash, stored_local_time
from timeball.schedule.locations import KINDS
from timeball.schedule.scheduler import Scheduling
from timeball.table.identities import ID_COLUMNS
from timeball.table.key_index import TableKeys

logger = logging.getLogger(__name__)

REASON = "zone rules"  # in the CANCEL row of an occurrence that has moved
_SCHEDULES_AT_ONCE = 1_024  # in one search
_OCCURRENCES_AT_ONCE = 64  # the bodies of this many fit into a frame
_LOG_ROWS = 65_536


class _Moving(NamedTuple):
    """A pending message, and its zone and new due time."""

    candidate: Candidate
    zone: str
    due_ms: int


class ZoneUpdates:
    """Moves due times at a start after an update of tzdata. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        snapshots: Snapshots,
        look_ups: LookUps,
        appender: Appender,
        successors: Successors,
        *,
        settings: Settings,
        clock: SchedulerClock,
        log: CommitLog,
        schedules: Schedules,
        zones: Zones,
        scheduling: Scheduling,
        file_keys: TableKeys,
        threads: Threads,
        rates: Rates,
    ) -> None:
        self._policy, self._snapshots, self._look_ups, self._appender = policy, snapshots, look_ups, appender
        self._successors, self._settings, self._clock, self._log = successors, settings, clock, log
        self._schedules, self._zones, self._scheduling = schedules, zones, scheduling
        self._file_keys, self._threads, self._rates = file_keys, threads, rates

    def facts(self, caller: Caller) -> ZoneFacts:
        """Return the version of tzdata, the zones in use, and the last update. Raises Forbidden."""
        self._policy.allow_somewhere(caller, Verb.LOOK)
        return self._zones.facts or ZoneFacts(tzdata=time_parsing.VERSION)

    async def run(self) -> None:
        """Move the due times that tzdata has changed since the last start. Called before the first release."""
        facts, version = self._zones.facts, time_parsing.VERSION
        # The usual case of a broker without local times costs nothing, however many messages are pending.
        if facts is None and not self._schedules.occurrences.count:
            return
        facts = facts or ZoneFacts(tzdata="")
        # An interrupted update has moved some messages, perhaps on a node with another version. So it must be finished
        # even if the recorded version is that of this node.
        is_finished = facts.update is None or facts.update.after == facts.tzdata
        # The hashes differ also if a finished update has left out messages of selections.
        if (
            facts.tzdata == version
            and is_finished
            and all(use.rules == rules_hash(zone) for zone, use in facts.zones.items())
        ):
            return
        update = facts.update
        if update is None or update.after != version:
            update = ZoneUpdate(before=facts.tzdata, after=version, at_ms=self._clock.now_ms())
        try:
            await self._update(facts, _Report(self._zones, update), may_be_mixed=not is_finished)
        except OverLimit as error:  # the next start tries again
            logger.warning("due times not moved tzdata=%s reason=%s", facts.tzdata, error)

    async def _update(self, facts: ZoneFacts, report: _Report, *, may_be_mixed: bool) -> None:
        """Move the messages and occurrences of zones with changed rules.

        `may_be_mixed`: an interrupted update has moved some messages, perhaps by the rules of a third version.
        """
        slots = self._schedules.slots_by_zone()
        slots.pop(UTC, None)
        hashes = {zone: rules_hash(zone) for zone in {*facts.zones, *slots}}
        # Schedules of former versions of Timeball are in no recorded zone. Their zones count as changed, and a schedule
        # whose time is right does not move.
        changed = {
            zone
            for zone, rules in hashes.items()
            if may_be_mixed or zone not in facts.zones or facts.zones[zone].rules != rules
        }
        # Schedules first, because a look-up by number finds them without a search of the table.
        for zone in sorted(changed & slots.keys()):
            for begin in range(0, len(slots[zone]), _SCHEDULES_AT_ONCE):
                await self._move_schedules(zone, slots[zone][begin : begin + _SCHEDULES_AT_ONCE], report)
        zones = {
            zone for zone in changed if zone in facts.zones and facts.zones[zone].until_ms and hashes[zone]
        }
        if zones:
            # One snapshot for the whole search: a message that has moved is not found again at its new due time.
            async with self._snapshots.taken() as snapshot:
                parts = self._find_moving(snapshot, zones)
                while (part := await in_thread(self._threads.background, next, parts, None)) is not None:
                    await self._move_messages(part, report)
        await self._finish(hashes, slots.keys(), report)
        logger.info(
            "due times moved tzdata=%s former=%s messages=%d schedules=%d", time_parsing.VERSION,
            facts.tzdata or "unknown", *report.totals(),
        )  # fmt: skip

    async def _finish(
        self, hashes: Mapping[str, str], of_schedules: Collection[str], report: _Report
    ) -> None:
        """Append the new version, and the zones that are still in use with the hashes of their rules."""
        facts, now_ms = report.facts(), self._clock.now_ms()
        hashes = {
            zone: facts.zones[zone].rules if zone in report.unmoved_zones else rules
            for zone, rules in hashes.items()
        }
        until_ms = {zone: use.until_ms for zone, use in facts.zones.items()}
        in_use = {
            zone: ZoneUse(rules, until_ms.get(zone, 0))
            for zone, rules in hashes.items()
            if zone in of_schedules or until_ms[zone] >= now_ms
        }
        change = self._zones.build_change(
            msgspec.structs.replace(facts, tzdata=time_parsing.VERSION, zones=in_use)
        )
        durable = self._appender.append(change.rows).durable
        change.apply()
        await durable

    # -- schedules -----------------------------------------------------------------------------------------------

    async def _move_schedules(self, zone: str, slots: Int64Array, report: _Report) -> None:
        """Move the pending occurrences of the schedules in these slots, as far as their times have changed."""
        # The local time that a schedule has chosen is read from its pending message. Its rule would compute another
        # one, by the new rules of the zone.
        schedules = self._schedules.at(slots)
        lookup = await self._look_ups.look_up(
            Names(seqs=[schedule.progress.number for schedule in schedules])
        )
        selected = await self._look_ups.select(lookup.candidates)
        rows = await in_thread(
            self._threads.files, read_scheduled_rows, self._log.reader, self._file_keys,
            self._scheduling.hour_log.pending.live, lookup.candidates,
        )  # fmt: skip
        texts = zip(rows.column("seq").to_pylist(), rows.column("properties").to_pylist(), strict=True)
        local_times = {number: decode_properties(text or "").get(OCCURRENCE, "") for number, text in texts}
        now_ms = self._clock.now_ms()
        moved = []
        for name, facts, progress, _ in schedules:
            try:
                after_ms = Rule.from_text(facts.rule_text).resumes_after_ms(
                    local_times[progress.number], progress.after_ms
                )
                first = first_after(facts.rule_text, after_ms)
            # The zone is not in tzdata any more, or the row is gone. The next release reports it.
            except (InvalidDelay, KeyError) as error:
                logger.warning("schedule not moved name=%s reason=%s", name, error)
                continue
            # Compared without the catch-up, which decides about missed occurrences when they are handed out.
            if first is not None and first.due_ms != progress.due_ms:
                change = selected.get(progress.number)
                # A selection that does not cancel has set its time. The schedule goes on with the new rules later.
                if change is not None and change.owner is None:
                    continue
                owner = None if change is None else change.owner
                reason = REASON if owner is None else reason_of(owner.name)
                after_ms = after_ms if owner is None else first.due_ms
                moved.append((following(name, facts, progress, after_ms, now_ms), progress, reason))
        for begin in range(0, len(moved), _OCCURRENCES_AT_ONCE):
            await self._append(zone, moved[begin : begin + _OCCURRENCES_AT_ONCE], now_ms, report)

    async def _append(
        self, zone: str, moved: Sequence[tuple[Next, Progress, str]], now_ms: int, report: _Report
    ) -> None:
        """Replace the pending occurrences of these schedules in one frame. On return it is durable.

        `moved` contains the next and the present state of each schedule, and the reason of its CANCEL row.
        """
        self._log.writer.check_admission()
        # No await from here to the append, as for each change of a schedule.
        was_pending = self._scheduling.scheduler.cancel(
            np.array([progress.due_ms for _, progress, _ in moved]),
            np.array([progress.number for _, progress, _ in moved]),
        )
        states = [state for state, is_moved in zip(moved, was_pending.tolist(), strict=True) if is_moved]
        if not states:
            return
        for next_state, progress, reason in states:
            if next_state.occurrence is not None and reason == REASON:
                report.add(zone, progress.due_ms, next_state.occurrence.due_ms, schedules=1)
        cancels = rows_of(
            [
                build_cancel_row(next_state.name, next_state.facts, progress, now_ms, reason)
                for next_state, progress, reason in states
            ]
        )
        continuation = self._successors.continuation([next_state for next_state, _, _ in states], now_ms)
        successors = continuation.rows(self._log.writer.next_seq + cancels.num_rows)
        change = report.change()
        durable = self._appender.append(pa.concat_batches([cancels, successors, change.rows])).durable
        continuation.apply()
        change.apply()
        await durable

    # -- messages ------------------------------------------------------------------------------------------------

    def _find_moving(self, snapshot: Snapshot, zones: set[str]) -> Iterator[list[_Moving]]:
        """Yield the pending messages whose due times have changed, in parts (background thread)."""
        for rows in chain(self._in_log(snapshot), self._in_files(snapshot)):
            moving = dict[int, _Moving]()  # by version: a later row of the log replaces an earlier one
            for row, text in rows:
                local, zone = stored_local_time(decode_properties(text).get(LOCAL_TIME, ""))
                if zone not in zones:
                    continue
                try:
                    due_ms, _ = local_due_ms(local, zone)
                except InvalidDelay:
                    continue  # a client has set the property together with a due time of its own
                if due_ms != row.due_ms:
                    moving[row.version] = _Moving(_candidate(row), zone, due_ms)
            # Settled messages are left out here, so that their rows are not read. The scheduler decides again.
            candidates = [message.candidate for message in moving.values()]
            is_pending = snapshot.are_pending(
                np.array([candidate.due_ms for candidate in candidates], np.int64),
                np.array([candidate.seq for candidate in candidates], np.int64),
            ).tolist()
            yield [message for message, waits in zip(moving.values(), is_pending, strict=True) if waits]

    def _in_log(self, snapshot: Snapshot) -> Iterator[Iterator[tuple[FoundRow, str]]]:
        """Yield the messages of the log with a local time, and their properties, without messages of delay levels."""
        begin_seq = max(snapshot.from_seq, self._log.reader.first_seq)
        for rows in self._log.reader.coalesced(begin_seq, snapshot.to_seq, KINDS, _LOG_ROWS, COLUMNS):
            local_rows = _with_local_time(rows)
            yield (
                (row, row.properties)
                for row in rows_in_log(local_rows.select(COLUMNS))
                if row.properties
                and not row.is_level
                and row.at_seq is not None
                and row.at_seq >= snapshot.watermark
            )

    def _in_files(self, snapshot: Snapshot) -> Iterator[Iterator[tuple[FoundRow, str]]]:
        """Yield the messages of the table with a local time, and their properties, row group by row group."""
        for entry in snapshot.entries:
            # A separate open file, because the reader thread has its own. Closed before the next one: a footer takes
            # memory.
            file = self._snapshots.open_file(entry)
            for group in file.groups_between((snapshot.first_ms(entry), 0), LAST_POSITION):
                rows = _with_local_time(file.read_group(group, [*ID_COLUMNS, "properties"]))
                texts = rows.column("properties").to_pylist()
                yield zip(rows_in_files(rows.select(ID_COLUMNS).to_pylist()), texts, strict=True)
            file.close()

    async def _move_messages(self, moving: Sequence[_Moving], report: _Report) -> None:
        """Move these messages, without messages of selections, whose zones are added to `report.unmoved_zones`."""
        # The gate is held, so that no selection changes before the moves.
        async with self._look_ups.gate.passing():
            selected = await self._look_ups.select([message.candidate for message in moving])
            report.unmoved_zones.update(
                message.zone for message in moving if message.candidate.number in selected
            )
            await self._move_pending(
                [message for message in moving if message.candidate.number not in selected], report
            )

    async def _move_pending(self, moving: Sequence[_Moving], report: _Report) -> None:
        """Move the messages that are still pending, in frames of bounded size. On return they are durable."""
        begin = 0
        while begin < len(moving):
            part = moving[begin : begin + SLICE_ROWS]
            rows, count = await in_thread(
                self._threads.files, read_slice, self._log.reader, self._file_keys,
                self._scheduling.hour_log.pending.live, [message.candidate for message in part],
            )  # fmt: skip
            begin += count
            by_version = {message.candidate.seq: message for message in part[:count]}
            for frame in split_into_frames(rows) if rows.num_rows else ():
                chosen = [by_version[seq] for seq in frame.column("seq").to_pylist()]
                durable = move_frame(
                    self._appender, np.array([message.due_ms for message in chosen], np.int64), frame,
                    [message.candidate for message in chosen], {}, is_duration=False, keeps_local_time=True,
                    also=partial(_report_moved, report, by_version), settings=self._settings, clock=self._clock,
                    writer=self._log.writer, scheduler=self._scheduling.scheduler,
                    outcomes=self._scheduling.outcomes, successors=self._successors, rates=self._rates,
                )  # fmt: skip
                # One frame at a time, so that the memory of a start does not grow with the number of moved messages.
                if durable is not None:
                    await durable


def _with_local_time(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """Select the rows with the property LOCAL_TIME."""
    return rows.filter(pc.match_substring(rows.column("properties"), LOCAL_TIME))


def _candidate(row: FoundRow) -> Candidate:
    """Convert a row that a search has found to a candidate of a look-up."""
    return Candidate(
        "", row.number, row.version, row.due_ms, row.topic, row.unique_key, row.keys, row.accepted_ms or 0,
        row.is_level, row.in_table, row.at_seq,
    )  # fmt: skip


class _Report:
    """The moves of an update so far."""

    def __init__(self, zones: Zones, update: ZoneUpdate) -> None:
        self._zones, self._update = zones, update
        self.unmoved_zones = set[str]()  # the zones of messages that keep their due times
        # By zone and by the distance of the move in ms.
        self._moved = {(moves.zone, moves.after_ms - moves.before_ms): moves for moves in update.moved}

    def add(self, zone: str, before_ms: int, after_ms: int, *, messages: int = 0, schedules: int = 0) -> None:
        """Count a moved message or occurrence. Moves of one zone by the same distance are counted together.

        `before_ms` of their entry is the earliest of the former due times.
        """
        distance_ms = after_ms - before_ms
        earlier = self._moved.get((zone, distance_ms), ZoneMoves(zone, before_ms, after_ms, 0, 0))
        first_ms = min(earlier.before_ms, before_ms)
        self._moved[zone, distance_ms] = ZoneMoves(
            zone, first_ms, first_ms + distance_ms, earlier.messages + messages, earlier.schedules + schedules
        )

    def change(self) -> Change:
        """Build the META row for the frame of the counted moves."""
        return self._zones.build_change(self.facts())

    def facts(self) -> ZoneFacts:
        """Build the recorded state, with the moves so far."""
        moved = [self._moved[key] for key in sorted(self._moved)]
        # Read now: the moved messages may have extended the use of their zones.
        facts = self._zones.facts or ZoneFacts(tzdata="")
        return msgspec.structs.replace(facts, update=msgspec.structs.replace(self._update, moved=moved))

    def totals(self) -> tuple[int, int]:
        """Count the moved messages and schedules."""
        all_moves = self._moved.values()
        return sum(moves.messages for moves in all_moves), sum(moves.schedules for moves in all_moves)


def _report_moved(report: _Report, moving: dict[int, _Moving], moved: Sequence[Candidate]) -> Change:
    """Count these moved messages, and build the META row of the report. `moving`: by version."""
    for candidate in moved:
        _, zone, due_ms = moving[candidate.seq]
        report.add(zone, candidate.due_ms, due_ms, messages=1)
    return report.change()
