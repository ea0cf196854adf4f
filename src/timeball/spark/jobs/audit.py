"""The job `audit` checks that each accepted message is in exactly one state.

    accepted = released + cancelled + expired + replaced + selected + missed + pending

It compares three independent sources: the ledger (past events), the log after the ledger's end (newer events), and the
rows that are stored for pending messages, in the pending table, in the log's tail, and for delay levels. A message has
*ended* when it is released or cancelled. Let E be the end of the log. The audit counts events of the rows
since <= seq < E, and reads one version of the table, that of E.

    lost        accepted, not ended, and not stored: neither its first row nor a row that moved it
    early       released before its due time. A message whose delay follows elapsed time gets a new due time when the
                clock is set. Its release row contains both this due time, which counts here, and the original one
    duplicate   accepted, ended or stored more than once
    unknown     ended or stored, but never accepted
    changed     stored or released with another due time than the log gave it. The log does not have the due times of
                a bulk write. So messages of a bulk write are compared only if they were rescheduled
    queue_gaps  positions of a queue that are missing or used twice, in the kept part of the log
    overdue     pending although due more than `overdue_ms` ago. Not a breach, because the broker may have been down

An audit begins where the last balanced audit ended (audit_snapshot.py): it reads newer events, and all stored rows. A
full audit reads all events. Both first compare sets of messages, by group of message numbers (views/audit_sql.py).
Groups that differ, or have overdue messages, are *suspect*. They are then judged message by message, from all events,
so the report names each message with a difference. The same SQL runs on DuckDB and on Spark (audit_engines.py).

In a cluster, each group is audited separately, because a message never leaves its group. Then the counts are added.

The broker works during an audit. It may write a message again after E, and retention may remove its older row. The
message would then look lost, so the audit runs again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from timeball.model.answers import Status
from timeball.model.errors import Corrupt, NotFound, OutOfRange, StorageError
from timeball.model.message import Int64Array, Kind, int64
from timeball.spark.endpoint import GROUP, Endpoint, group_table_uri, read_groups
from timeball.spark.jobs import ledger
from timeball.spark.jobs.audit_engines import AuditEngine, DuckDbEngine, Reads, SparkAuditEngine
from timeball.spark.jobs.audit_snapshot import (
    AuditSnapshot,
    Facts,
    read_snapshot,
    snapshot_uri,
    write_snapshot,
)
from timeball.spark.log_events import EVENT_SCHEMA, attach_events
from timeball.spark.table_store import as_dataset, default_table_uri, open_table
from timeball.spark.views import audit_sql
from timeball.spark.views.audit_sql import BULK_SCHEMA, ENDED_SCHEMA, EVENT_COUNTS, AuditTexts
from timeball.spark.views.snapshot import status_with_all_attaches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = logging.getLogger("timeball.spark")

OVERDUE_MS = 10_000
OFFENDERS_MAX = 100
OUTCOMES = ("released", "cancelled", "expired", "replaced", "selected", "missed", "pending")
BREACHES = ("lost", "early", "duplicate", "unknown", "changed")
COUNTS = ("accepted", "occurrences", "moved", "undone", *OUTCOMES, "overdue", "queue_gaps", *BREACHES)
AUDITS_MAX = 3  # repeats are needed if retention removes a segment during the audit
SELECTION_KEY = "selection/"  # of META rows


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of an audit. All but `version` and `now_ms` are rows of the log."""

    since: int  # the first row whose events count
    first: int  # the first kept row of the log, when its end was `end`
    end: int  # the end of the log: rows before it count
    ledger_end: int  # the events of rows before it are read from the ledger, all others from the log
    watermark: int  # the tail of the log begins at this row
    version: int  # of the pending table
    now_ms: int
    begin: int = 0  # earlier events were counted by the last balanced audit


class AuditReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The balance of an audit. Counts are scheduled messages, except `queue_gaps`: queues, at most OFFENDERS_MAX.

    `occurrences`: accepted messages of recurring schedules. `moved`: changes of due times. `undone`: messages of
    selections that were undone, in the kept log. `full_because`: the reason of a full audit, if none was asked for.
    `offenders`: breach -> up to OFFENDERS_MAX rows. Also contains overdue messages. `groups`: the report of each group,
    if there are several. Then `scope` is None in the sum.
    """

    ok: bool
    scope: Scope | None
    accepted: int
    released: int
    cancelled: int
    expired: int
    replaced: int = 0
    selected: int = 0
    missed: int = 0
    pending: int
    occurrences: int = 0
    moved: int = 0
    undone: int = 0
    lost: int
    early: int
    duplicate: int
    unknown: int
    changed: int = 0
    overdue: int
    queue_gaps: int
    full_because: str = ""
    offenders: dict[str, list[dict[str, Any]]]
    groups: dict[str, AuditReport] = {}


def run(
    spark: SparkSession | None,
    endpoint: str,
    *,
    ledger_uri: str | None = None,
    overdue_ms: int = OVERDUE_MS,
    full: bool = False,
) -> AuditReport:
    """Audit all groups at `endpoint`, on Spark, or with `spark` None on DuckDB in this process.

    Without a ledger, the audit covers only the kept part of the log. `ledger_uri`: with `{group}` in it if there are
    several groups, by default beside the pending table. `full`: read all events. Raises OutOfRange if retention has
    removed rows of the log that the ledger does not have.
    """
    groups = read_groups(endpoint)
    reports = {}
    for group in groups:
        uri = group_table_uri("--ledger", ledger_uri, group.name, len(groups))
        engine: AuditEngine = (
            DuckDbEngine() if spark is None else SparkAuditEngine(spark, f"audit of {group.endpoint}")
        )
        with engine:
            audit = Audit(engine, group.endpoint, uri, overdue_ms, full=full)
            reports[group.name] = _repeat_while_retention_runs(audit)
    return reports[groups[0].name] if len(groups) == 1 else add_up(reports)


def add_up(groups: dict[str, AuditReport]) -> AuditReport:
    """Add the reports of all groups. Offenders get the column `group`."""
    offenders: dict[str, list[dict[str, Any]]] = {}
    for name, report in groups.items():
        for breach, rows in report.offenders.items():
            offenders.setdefault(breach, []).extend({GROUP: name, **row} for row in rows)
    counts = {name: sum(getattr(report, name) for report in groups.values()) for name in COUNTS}
    return AuditReport(
        ok=all(report.ok for report in groups.values()),
        scope=None,
        offenders={breach: rows[:OFFENDERS_MAX] for breach, rows in offenders.items()},
        groups=groups,
        **counts,
    )


def _repeat_while_retention_runs(audit: Audit) -> AuditReport:
    """Audit one group. Repeats the audit if retention may have removed rows that it still had to read."""
    for tries_left in reversed(range(AUDITS_MAX)):
        try:
            report = audit.run()
        except OutOfRange as error:
            if not tries_left:
                raise
            LOG.info("auditing again job=audit reason=%s", error)
            continue
        if not report.lost or not tries_left or not audit.has_retention_removed_rows():
            break
        LOG.info("auditing again, retention may have removed their rows job=audit lost=%d", report.lost)
    return report


# ---- one group ------------------------------------------------------------------------------------------------


class _UnusableSnapshotError(Exception):
    """The snapshot of the last balanced audit does not fit to the log. The text is the reason of a full audit."""


class Audit:
    """The audit of one group, on one engine."""

    def __init__(
        self, engine: AuditEngine, endpoint: str, ledger_uri: str | None, overdue_ms: int, *, full: bool
    ) -> None:
        """`overdue_ms`: from this lateness on, a pending message is overdue. `full`: ignore the last balanced audit."""
        self.endpoint = endpoint
        self._engine, self._ledger_uri, self._overdue_ms, self._is_full = engine, ledger_uri, overdue_ms, full

    def run(self) -> AuditReport:
        """Read the bounds of the audit, and audit once: from the last balanced audit on, or else in full.

        Raises OutOfRange if retention has removed rows that the audit needs, and StorageError.
        """
        with Endpoint(self.endpoint) as broker:
            # One status has the version of the table and the end of the log that belong together.
            self._status = status_with_all_attaches(broker)
        self._ledger, self._scope = read_scope(self._status, self._ledger_uri)
        uri = snapshot_uri(self._status.table.uri)
        if self._is_full:
            return self._audit(uri, None)
        try:
            last_audit = self._check_fit(read_snapshot(uri))
        except (NotFound, Corrupt, StorageError, _UnusableSnapshotError) as error:
            return self._audit(uri, None, str(error))
        try:
            return self._audit(uri, last_audit)
        except _UnusableSnapshotError as error:
            return self._audit(uri, None, str(error))

    def has_retention_removed_rows(self) -> bool:
        """Check whether retention has removed rows of the log since the audit read its bounds."""
        with Endpoint(self.endpoint) as broker:
            return broker.status().log.first_seq > self._scope.first

    def _check_fit(self, last_audit: AuditSnapshot) -> AuditSnapshot:
        """Check that the snapshot is of this log, and that all events after it are kept. Returns the snapshot.

        Raises _UnusableSnapshotError.
        """
        facts = last_audit.facts
        if facts.end > self._scope.end or self._stored_at(facts.end - 1) not in (None, facts.end_ms):
            raise _UnusableSnapshotError("the snapshot of the last balanced audit is of another log")
        if facts.end < self._scope.since:
            raise _UnusableSnapshotError("events since the last balanced audit are no longer kept")
        return last_audit

    def _stored_at(self, seq: int) -> int | None:
        """Read the time (ms) at which a row of the log was stored. None if the log does not have the row any more."""
        if seq < self._scope.first:
            return None
        with Endpoint(self.endpoint) as broker:
            for batch in broker.read_log(seq, seq + 1, columns=["store_ms"]):
                return int(batch.column(0)[0].as_py())
        return None

    def _audit(self, uri: str, last_audit: AuditSnapshot | None, full_because: str = "") -> AuditReport:
        """Compare events and stored rows, judge the messages of suspect groups, and write the snapshot if all balance.

        `uri`: of the snapshot. `last_audit`: the snapshot from which the audit continues, None for a full audit.
        `full_because`: see AuditReport. Raises _UnusableSnapshotError if the snapshot contradicts the log.
        """
        status, engine = self._status, self._engine
        scope = msgspec.structs.replace(self._scope, begin=self._scope.since)
        if last_audit is not None:
            scope = msgspec.structs.replace(scope, since=last_audit.facts.since, begin=last_audit.facts.end)
        texts = AuditTexts(
            engine.dialect,
            engine.relation,
            since=scope.since,
            settled_ms=status.settled_before_ms,
            overdue_before_ms=status.now_ms - self._overdue_ms,
        )
        engine.read(self._build_reads(scope, last_audit))
        engine.register("kept", ENDED_SCHEMA.empty_table() if last_audit is None else last_audit.ended)
        bulk, undone = self._read_spans(scope.begin)
        sums = compare(
            engine.query(texts.events()), engine.query(texts.rows()), bulk, scope.since, last_audit
        )
        counts = sums.counts
        counts["undone"] += undone
        queues, gaps = self._check_queues(texts, scope, last_audit)
        offenders, breaches = self._judge(texts, scope, sums, last_audit)
        if gaps:
            offenders["queue_gaps"] = gaps
        counts["pending"] = sums.pending
        is_balanced = counts["accepted"] == sum(counts[name] for name in OUTCOMES)
        is_balanced = is_balanced and not gaps and not any(breaches[name] for name in BREACHES)
        numbers: dict[str, Any] = {name: counts[name] for name in COUNTS if name in counts}
        if is_balanced:
            self._write_snapshot(uri, texts, scope, sums, queues)
        return AuditReport(
            ok=is_balanced,
            scope=scope,
            offenders=offenders,
            full_because=full_because,
            queue_gaps=len(gaps),
            **(numbers | breaches),
        )

    def _write_snapshot(
        self, uri: str, texts: AuditTexts, scope: Scope, sums: Sums, queues: dict[str, dict[int, int]]
    ) -> None:
        """Write the snapshot of this audit. `queues`: topic -> queue -> the position after the last one."""
        facts = Facts(
            since=scope.since,
            end=scope.end,
            end_ms=self._stored_at(scope.end - 1),
            counts=sums.counts,
            queues=queues,
            level_begin=self._level_begin(texts, scope),
        )
        write_snapshot(uri, sums.to_snapshot(facts, self._engine.query(texts.ended()).cast(ENDED_SCHEMA)))

    # ---- the sources ----

    def _build_reads(self, scope: Scope, last_audit: AuditSnapshot | None, begin: int | None = None) -> Reads:
        """Choose the parts of log and tables to read. `begin`: the first row whose events are read (scope.begin)."""
        begin = scope.begin if begin is None else begin
        first, end = scope.first, scope.end
        # Messages of delay levels may be anywhere in the log. The last audit has found out where the oldest one is.
        level_begin = first if last_audit is None else max(first, last_audit.facts.level_begin)
        fresh_begin = max(begin, min(scope.ledger_end, end))
        return Reads(
            endpoint=self.endpoint,
            table_uri=self._status.table.uri,
            table_version=scope.version,
            ledger=self._ledger,
            events=(begin, min(scope.ledger_end, end)),
            fresh_events=(fresh_begin, end),
            tail=(min(max(scope.watermark, first), end), end),
            levels=(min(level_begin, end), end),
            placed=(min(max(begin, first), end), end),
        )

    def _level_begin(self, texts: AuditTexts, scope: Scope) -> int:
        """Find the first row of the log that may wait for a delay level after this audit."""
        [row] = self._engine.query(texts.first_of_level()).to_pylist()
        return scope.end if row["seq"] is None else int(row["seq"])

    def _read_spans(self, begin: int) -> tuple[pa.Table, int]:
        """Read the ranges of bulk writes that were attached from row `begin` on, as (first_seq, rows, event_seq).

        Also returns the number of messages of selections that were undone from row `begin` on.
        """
        scope, columns = self._scope, ["first_seq", "rows", "event_seq"]
        tables = [EVENT_SCHEMA.empty_table().select(columns)]
        if self._ledger is not None:
            # A range of one message is among the events of single messages (`Reads.events`).
            is_range = ds.field("rows") > 1
            is_inside = (ds.field("event_seq") >= begin) & (ds.field("event_seq") < scope.end)
            tables.append(
                as_dataset(self._ledger, EVENT_SCHEMA).to_table(columns, filter=is_range & is_inside)
            )
        fresh_begin = max(begin, scope.ledger_end)
        undone: dict[str, int] = {}
        if (low := max(begin, scope.first)) < scope.end:
            with Endpoint(self.endpoint) as broker:
                names = ["seq", "kind", "store_ms", "unique_key", "body"]
                for batch in broker.read_log(low, scope.end, [Kind.TABLE, Kind.META], columns=names):
                    kind, seq = (np.asarray(batch.column(name)) for name in ("kind", "seq"))
                    ranges = batch.filter(pa.array((kind == int(Kind.TABLE)) & (seq >= fresh_begin)))
                    events = pa.Table.from_pylist(list(attach_events(ranges)), EVENT_SCHEMA)
                    # With ranges of one message: `Reads.fresh_events` has no event of a bulk write.
                    tables.append(events.select(columns))
                    _find_undone(batch, low, undone)
        return pa.concat_tables(tables), sum(undone.values())

    # ---- the judgement ----

    def _judge(
        self, texts: AuditTexts, scope: Scope, sums: Sums, last_audit: AuditSnapshot | None
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
        """Judge the messages of suspect groups one by one.

        Returns {breach: up to OFFENDERS_MAX messages} and {breach: number of messages}, both also for `overdue`.
        Replaces the sums of suspect groups by exact ones. Raises _UnusableSnapshotError if the events before the
        snapshot are needed but no longer kept, or if only the snapshot was wrong.
        """
        names = (*BREACHES, "overdue")
        suspects = sums.groups[sums.is_suspect]
        if not len(suspects):
            return {}, dict.fromkeys(names, 0)
        engine = self._engine
        if last_audit is not None:  # a full audit has read all events
            if self._scope.since > scope.since:
                raise _UnusableSnapshotError("events before the last balanced audit are no longer kept")
            no_rows = (scope.end, scope.end)
            engine.read(replace(self._build_reads(scope, None, scope.since), placed=no_rows))
        engine.register("suspects", pa.table({"grp": suspects}))
        bulk, _ = self._read_spans(scope.since)
        engine.register("bulk", _bulk_messages_in(suspects, bulk, scope.since))
        engine.materialize("judged", texts.judged())
        [counts] = engine.query(texts.count(names)).to_pylist()
        sums.replace_suspects(engine.query(texts.open()))
        if (
            last_audit is not None
            and not any(counts[name] for name in BREACHES)
            and sums.contradicts_snapshot
        ):
            raise _UnusableSnapshotError("the snapshot of the last balanced audit does not fit to the log")
        offenders = {
            name: engine.query(texts.offenders(name, OFFENDERS_MAX)).to_pylist()
            for name in names
            if counts[name]
        }
        return offenders, counts

    def _check_queues(
        self, texts: AuditTexts, scope: Scope, last_audit: AuditSnapshot | None
    ) -> tuple[dict[str, dict[int, int]], list[dict[str, Any]]]:
        """Check the positions of all queues.

        Returns (topic -> queue -> next position, at most OFFENDERS_MAX queues with gaps or repeated positions). If
        there are any, the relations of the engine become those of a full audit.
        """
        last_ends = {} if last_audit is None else last_audit.facts.queues
        ends, has_gaps = {topic: dict(offsets) for topic, offsets in last_ends.items()}, False
        for row in self._engine.query(texts.queues()).to_pylist():
            topic, queue = row.pop("topic"), row.pop("queue_id")
            begin = last_ends.get(topic, {}).get(queue, row["first"])
            has_gaps |= begin != row["first"] or not audit_sql.are_consecutive(**row)
            ends.setdefault(topic, {})[queue] = row["last"] + 1
        if not has_gaps:
            return ends, []
        if last_audit is not None:  # the gaps are counted in the whole kept log
            self._engine.read(self._build_reads(scope, None, scope.since))
        gaps = self._engine.query(f"{texts.gaps()} LIMIT {OFFENDERS_MAX}").to_pylist()
        return ends, gaps


def read_scope(status: Status, ledger_uri: str | None) -> tuple[DeltaTable | None, Scope]:
    """Open the ledger, and compute the bounds of a full audit. Returns None for a ledger that does not exist.

    Raises OutOfRange if retention has removed rows of the log whose events the ledger does not have.
    """
    log = status.log
    scope = Scope(
        since=log.first_seq,
        first=log.first_seq,
        end=log.durable_seq,
        ledger_end=log.first_seq,
        watermark=status.watermark,
        version=status.table.version,
        now_ms=status.now_ms,
    )
    try:
        table = open_table(ledger_uri or default_table_uri(ledger.NAME, status.table.uri, status))
    except NotFound:
        LOG.info("no ledger, only the log is audited job=audit since_seq=%d", scope.since)
        return None, scope
    since, ledger_end = ledger.bounds(table)
    if ledger_end < log.first_seq:
        raise OutOfRange(
            f"the ledger ends at row {ledger_end}, the log begins at {log.first_seq}: events are lost"
        )
    return table, msgspec.structs.replace(scope, since=since, ledger_end=ledger_end)


def _find_undone(batch: pa.RecordBatch, begin: int, undone: dict[str, int]) -> None:
    """Find the selections among these META rows that were undone at row `begin` or later.

    Adds them to `undone`: key of the selection -> number of its messages.
    """
    rows = batch.filter(pc.fill_null(pc.starts_with(batch.column("unique_key"), SELECTION_KEY), False))
    for key, body in zip(rows.column("unique_key").to_pylist(), rows.column("body").to_pylist(), strict=True):
        facts = msgspec.json.decode(body) if body else {}
        if (facts.get("undone_seq") or 0) >= begin:
            undone[key] = facts.get("count") or 0


def _bulk_messages_in(groups: Int64Array, bulk: pa.Table, since: int) -> pa.Table:
    """List the messages of these groups that bulk writes have accepted, in BULK_SCHEMA.

    `bulk`: the ranges of the bulk writes. Numbers below `since` are left out.
    """
    parts = [BULK_SCHEMA.empty_table()]
    for first, rows, event_seq in zip(*(column.to_pylist() for column in bulk.columns), strict=True):
        # The groups that the range touches, and all numbers of these groups.
        low, high = np.searchsorted(groups, [first - audit_sql.GROUP_NUMBERS + 1, first + rows])
        numbers = (groups[low:high, None] + np.arange(audit_sql.GROUP_NUMBERS)).ravel()
        numbers = numbers[(numbers >= max(first, since)) & (numbers < first + rows)]
        parts.append(pa.table([numbers, np.full(len(numbers), event_seq)], schema=BULK_SCHEMA))
    return pa.concat_tables(parts)


# ---- sets of messages, by group -------------------------------------------------------------------------------


@dataclass
class Sums:
    """The pending messages by group of numbers: as a set, and the sum of the hashes of their due times.

    All arrays have one entry for each group. Entries of suspect groups are exact only after `replace_suspects`.
    """

    groups: Int64Array  # the first number of each group, ascending
    open_bits: Int64Array  # the set of its pending messages, one bit each
    due_sums: Int64Array
    is_suspect: npt.NDArray[np.bool_]
    counts: dict[str, int] = field(default_factory=dict)  # count of a report -> its value
    contradicts_snapshot: bool = False  # True if `replace_suspects` has changed the set of a suspect group

    @property
    def pending(self) -> int:
        """The number of pending messages."""
        return int(np.bitwise_count(self.open_bits).sum())

    def replace_suspects(self, rows: pa.Table) -> None:
        """Replace the entries of suspect groups by `rows`, the result of `AuditTexts.open`."""
        expected = self.open_bits[self.is_suspect].copy()
        self.open_bits[self.is_suspect] = self.due_sums[self.is_suspect] = 0
        indexes = np.searchsorted(self.groups, _values(rows, "grp"))
        self.open_bits[indexes] = _values(rows, "stored_bits")
        self.due_sums[indexes] = _values(rows, "stored_due_sum")
        self.contradicts_snapshot = bool((expected != self.open_bits[self.is_suspect]).any())

    def to_snapshot(self, facts: Facts, ended: pa.Table) -> AuditSnapshot:
        """Build the snapshot of these sums. `ended`: the result of `AuditTexts.ended`."""
        has_open = self.open_bits != 0
        return AuditSnapshot(
            facts, self.groups[has_open], self.open_bits[has_open], self.due_sums[has_open], ended
        )


def compare(
    events: pa.Table, rows: pa.Table, bulk: pa.Table, since: int, last_audit: AuditSnapshot | None
) -> Sums:
    """Compare the messages that should be pending, according to events, with the stored ones. Finds suspect groups.

    `events`, `rows`: the results of AuditTexts.events and .rows. `bulk`: ranges of numbers (first_seq, rows) that bulk
    writes have accepted, in addition to `events`. Numbers below `since` do not count. `last_audit`: its pending
    messages were accepted before `events`.
    """
    bulk_bits = [  # (groups, bits) of each range
        audit_sql.bits_of_range(max(first, since), rows - max(0, since - first))
        for first, rows in zip(
            bulk.column("first_seq").to_pylist(), bulk.column("rows").to_pylist(), strict=True
        )
        if first + rows > since
    ]
    if last_audit is None:
        last_groups = last_bits = last_due_sums = np.zeros(0, np.int64)
    else:
        last_groups, last_bits = last_audit.groups, last_audit.open_bits
        last_due_sums = last_audit.due_sums
    range_groups = [groups for groups, _ in bulk_bits]
    groups = np.unique(
        np.concatenate((_values(events, "grp"), _values(rows, "grp"), last_groups, *range_groups))
    )
    aligner = _Aligner(groups)
    accepted, ended = aligner.column(events, "accepted_bits"), aligner.column(events, "ended_bits")
    stored, stored_due_sums = aligner.column(rows, "stored_bits"), aligner.column(rows, "stored_due_sum")
    pending_before = aligner.align(last_groups, last_bits)
    # A message that occurs twice makes the sum of bits differ from the set.
    is_suspect = aligner.column(events, "accepted_sum") != accepted
    is_suspect |= aligner.column(events, "ended_sum") != ended
    is_suspect |= aligner.column(rows, "stored_sum") != stored
    is_suspect |= aligner.column(events, "early_count") > 0
    is_suspect |= (accepted & pending_before) != 0
    all_bulk = np.zeros(len(groups), np.int64)
    for bit_groups, bits in bulk_bits:
        indexes = np.searchsorted(groups, bit_groups)
        is_suspect[indexes] |= (all_bulk[indexes] & bits) != 0
        all_bulk[indexes] |= bits
    is_suspect |= (all_bulk & (accepted | pending_before)) != 0
    ever_accepted = accepted | pending_before | all_bulk
    open_bits = ever_accepted & ~ended
    is_suspect |= ((ended & ~ever_accepted) != 0) | (open_bits != stored)
    # The log does not have the due times of a bulk write, so groups of a bulk write only are not compared.
    due_sums = aligner.align(last_groups, last_due_sums) + aligner.column(events, "due_sum")
    is_suspect |= (due_sums != stored_due_sums) & (ever_accepted != all_bulk)
    # But it has the due times of their messages that were moved since.
    is_suspect |= (all_bulk & aligner.column(events, "moved_bits")) != 0
    totals = {name: int(_values(events, f"{name}_count").sum()) for name in EVENT_COUNTS}
    totals["accepted"] += sum(int(np.bitwise_count(bits).sum()) for _, bits in bulk_bits)
    return Sums(groups, open_bits, stored_due_sums, is_suspect, _counts(totals, last_audit))


def _counts(totals: dict[str, int], last_audit: AuditSnapshot | None) -> dict[str, int]:
    """Compute the counts of a report from EVENT_COUNTS of new events, and add those of the last balanced audit."""
    ended, _ = totals.pop("ended"), totals.pop("early")
    totals["cancelled"] = ended - sum(totals[name] for name in OUTCOMES if name in totals)
    counts = totals | {"undone": 0}
    last_counts = {} if last_audit is None else last_audit.facts.counts
    return {name: value + last_counts.get(name, 0) for name, value in counts.items()}


@dataclass(frozen=True)
class _Aligner:
    """Makes arrays with one entry for each of `groups` (ascending). Groups without a value have 0."""

    groups: Int64Array

    def column(self, table: pa.Table, name: str) -> Int64Array:
        """Align a column of a table. The table's column `grp` has the group of each row."""
        return self.align(_values(table, "grp"), _values(table, name))

    def align(self, groups: Int64Array, values: Int64Array) -> Int64Array:
        """Put the values of these distinct groups at the indexes of the groups."""
        result = np.zeros(len(self.groups), np.int64)
        result[np.searchsorted(self.groups, groups)] = values
        return result


def _values(table: pa.Table, name: str) -> Int64Array:
    column = table.column(name).combine_chunks()
    return int64(column.fill_null(0).cast(pa.int64()) if column.null_count else column.cast(pa.int64()))
