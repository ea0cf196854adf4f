"""The SQL texts of the audit. DuckDB and Spark run the same texts.

A *group* (column `grp`) is a range of GROUP_NUMBERS consecutive message numbers, named by its first number. A message
is one bit of its group. For each group, `bit_or` of the bits is the set of the messages, and `sum` differs from it if a
message occurs twice. So a few integers per group compare the events with the stored rows, message by message, and
neither engine sorts or joins the messages themselves. Due times are compared by a sum of hashes per group.

The methods of AuditTexts build these queries:

    events   the sets of messages and the counts according to the events, by group
    rows     the set of messages with stored rows that count as pending, by group
    ended    the rows that may still be stored, although their message was ended (released or cancelled) or moved
    judged   each message of the groups in {suspects}, with a flag for each difference
    open     the set of the pending messages in {judged}, by group
    queues   the positions of each queue, as sums
    gaps     the missing and repeated positions of each queue

An engine supplies these relations (audit_engines.py):

    {events}     EVENT_COLUMNS, one row for each event of a single message
    {filed}      FILED_COLUMNS, the rows of the pending table
    {logged}     LOGGED_COLUMNS, the SCHEDULED and MOVED rows of the log's tail and of delay levels
    {placed}     PLACED_COLUMNS, the queue positions of rows of the log
    {kept}       ENDED_SCHEMA, from the last balanced audit
    {suspects}   grp
    {bulk}       BULK_SCHEMA, the messages of bulk writes
    {judged}     the result of `judged`
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from timeball.model.message import READ_SCHEMA, SCHEDULE_TOPIC, TABLE_SCHEMA, Int64Array, Kind
from timeball.spark.log_events import EVENT_SCHEMA, EXPIRED, MISSED, OCCURRENCE, REPLACED, SELECTION
from timeball.spark.views.view_sql import Engine, Relation

EVENT_COLUMNS = (
    "event", "first_seq", "due_ms", "at_ms", "event_seq", "from_due_ms", "reason", "topic", "unique_key",
)  # fmt: skip
FILED_COLUMNS = ("seq", "number", "due_ms", "topic", "unique_key")
LOGGED_COLUMNS = ("seq", "kind", "source_seq", "due_ms", "topic", "unique_key")
PLACED_COLUMNS = ("topic", "queue_id", "queue_offset")
ENDED_SCHEMA = pa.schema([("seq", pa.int64()), ("newest_seq", pa.int64()), ("until_ms", pa.int64())])
BULK_SCHEMA = pa.schema([("seq", pa.int64()), ("event_seq", pa.int64())])
EVENTS = pa.schema([EVENT_SCHEMA.field(name) for name in EVENT_COLUMNS])
FILED = pa.schema([TABLE_SCHEMA.field(name) for name in FILED_COLUMNS])
LOGGED = pa.schema([READ_SCHEMA.field(name) for name in LOGGED_COLUMNS])
PLACED = pa.schema([READ_SCHEMA.field(name) for name in PLACED_COLUMNS])

# Fewer than 62, so that `sum` has room for messages that occur often.
GROUP_NUMBERS = 48
NEVER = (1 << 63) - 1  # newer than every row: the message has ended
PRIME = (1 << 31) - 1
_FACTOR = 1_000_003
MOVED = int(Kind.MOVED)

_BIT: dict[Engine, str] = {
    "duckdb": f"(cast(1 as bigint) << cast({{n}} % {GROUP_NUMBERS} as int))",
    "spark": f"shiftleft(cast(1 as bigint), cast({{n}} % {GROUP_NUMBERS} as int))",
}


def _due_hash(due: str) -> str:
    """Build the hash of the message `n` with this due time, from 0 to PRIME. It is not linear in either."""
    value = f"((n % {PRIME}) * {_FACTOR} + {due}) % {PRIME}"
    return f"(({value}) * ({value}) % {PRIME} * ({value}) % {PRIME})"


# Counts of a report -> the events that they count.
EVENT_COUNTS = {
    "accepted": "event = 'accepted'",
    "occurrences": f"event = 'accepted' and reason = '{OCCURRENCE}'",
    "moved": "event = 'moved'",
    "released": f"event = 'released' and reason <> '{EXPIRED}'",
    "expired": f"event in ('released', 'cancelled') and reason = '{EXPIRED}'",
    "replaced": f"event = 'cancelled' and reason = '{REPLACED}'",
    "selected": f"event = 'cancelled' and reason like '{SELECTION}%'",
    "missed": f"event = 'cancelled' and reason in ({', '.join(repr(reason) for reason in MISSED)})",
    "early": "event = 'released' and at_ms < due_ms",
    "ended": "event in ('released', 'cancelled')",
}

_EVENTS_TEXT = """
SELECT grp,
       coalesce(bit_or(CASE WHEN event = 'accepted' THEN bit END), 0) AS accepted_bits,
       CAST(sum(CASE WHEN event = 'accepted' THEN bit ELSE 0 END) AS BIGINT) AS accepted_sum,
       coalesce(bit_or(CASE WHEN event IN ('released', 'cancelled') THEN bit END), 0) AS ended_bits,
       CAST(sum(CASE WHEN event IN ('released', 'cancelled') THEN bit ELSE 0 END) AS BIGINT) AS ended_sum,
       coalesce(bit_or(CASE WHEN event = 'moved' THEN bit END), 0) AS moved_bits,
       CAST(sum(due_hash) AS BIGINT) AS due_sum,
       {counts}
FROM (
    SELECT n - n % {group_numbers} AS grp, {bit} AS bit, event, reason, at_ms, due_ms,
           CASE WHEN event IN ('accepted', 'moved') THEN 1 ELSE -1 END * {hash}
           - CASE WHEN event = 'moved' THEN {from_hash} ELSE 0 END AS due_hash
    FROM (
        SELECT event, first_seq AS n, coalesce(reason, '') AS reason, at_ms, due_ms, from_due_ms,
               CASE WHEN event IN ('accepted', 'moved') THEN due_ms ELSE coalesce(from_due_ms, due_ms) END AS hashed_ms
        FROM {events} WHERE first_seq >= {since}
    ) AS named
) AS signed
GROUP BY grp
"""

# A row of a message that was ended or moved may still be stored. Rows due before `settled_ms` are left out: their
# messages were ended, or they are overdue, and then the group does not match and is judged message by message.
_ENDED_TEXT = """
SELECT seq, max(newest_seq) AS newest_seq, max(until_ms) AS until_ms FROM (
    SELECT first_seq AS seq, CASE WHEN event = 'moved' THEN event_seq ELSE {never} END AS newest_seq,
           coalesce(from_due_ms, due_ms) AS until_ms
    FROM {events} WHERE event <> 'accepted' AND coalesce(from_due_ms, due_ms) >= {settled_ms}
    UNION ALL SELECT seq, newest_seq, until_ms FROM {kept} WHERE until_ms >= {settled_ms}
    {moved_again}
) AS rows_of_ended GROUP BY seq
"""
# A strategy may write a message again under the same due time. Only its newest row counts.
_MOVED_AGAIN_TEXT = """
    UNION ALL SELECT source_seq, seq, due_ms FROM {logged}
    WHERE kind = {moved} AND due_ms IS NOT NULL AND due_ms >= {settled_ms}
"""
_ROWS_TEXT = """
SELECT grp, coalesce(bit_or(bit), 0) AS stored_bits, CAST(sum(bit) AS BIGINT) AS stored_sum,
       CAST(sum({hash}) AS BIGINT) AS stored_due_sum
FROM (
    SELECT n, n - n % {group_numbers} AS grp, {bit} AS bit, stored.due_ms AS hashed_ms
    FROM (
        SELECT coalesce(number, seq) AS n, seq AS row_seq, due_ms FROM {filed} WHERE due_ms >= {settled_ms}
        UNION ALL
        SELECT CASE WHEN kind = {moved} THEN source_seq ELSE seq END AS n, seq AS row_seq, due_ms
        FROM {logged} WHERE due_ms >= {settled_ms}
    ) AS stored LEFT JOIN ({ended}) AS ended ON stored.n = ended.seq
    WHERE coalesce(newest_seq, 0) <= row_seq AND n >= {since}
) AS live
GROUP BY grp
"""

_JUDGED_TEXT = """
WITH facts AS (
    SELECT first_seq AS seq, event, topic, unique_key, due_ms, at_ms, event_seq, from_due_ms,
           CAST(1 AS BIGINT) AS copies
    FROM {events} WHERE first_seq >= {since} AND first_seq - first_seq % {group_numbers} IN (SELECT grp FROM {suspects})
    UNION ALL
    SELECT seq, 'accepted', NULL, NULL, NULL, NULL, event_seq, NULL, 1 FROM {bulk}
    UNION ALL
    SELECT n, 'stored', max(topic), max(unique_key), max(due_ms), NULL, row_seq, NULL, count(*)
    FROM (
        SELECT coalesce(number, seq) AS n, seq AS row_seq, due_ms, topic, unique_key FROM {filed}
        UNION ALL
        SELECT CASE WHEN kind = {moved} THEN source_seq ELSE seq END AS n, seq AS row_seq, due_ms, topic, unique_key
        FROM {logged} WHERE due_ms IS NOT NULL
    ) AS stored
    WHERE n >= {since} AND n - n % {group_numbers} IN (SELECT grp FROM {suspects})
    GROUP BY n, row_seq
),
folded AS (
    SELECT seq,
           count(CASE WHEN event = 'accepted' THEN 1 END) AS accepted,
           count(CASE WHEN event = 'released' THEN 1 END) AS released,
           count(CASE WHEN event = 'cancelled' THEN 1 END) AS cancelled,
           coalesce(max(CASE WHEN event = 'moved' THEN event_seq END), 0) AS moved_seq,
           coalesce(max(CASE WHEN event = 'stored' THEN event_seq END), -1) AS stored_seq,
           max_by(copies, CASE WHEN event = 'stored' THEN event_seq END) AS copies,
           max_by(due_ms, CASE WHEN event = 'stored' THEN event_seq END) AS stored_due_ms,
           max_by(due_ms, CASE WHEN event IN ('accepted', 'moved') AND due_ms IS NOT NULL THEN event_seq END)
               AS told_due_ms,
           min(CASE WHEN event = 'released' THEN at_ms END) AS released_ms,
           min(CASE WHEN event = 'released' THEN due_ms END) AS shifted_ms,
           min(CASE WHEN event = 'released' THEN from_due_ms END) AS from_due_ms,
           coalesce(max(CASE WHEN topic <> '{schedule_topic}' THEN topic END), max(topic)) AS topic,
           max(unique_key) AS unique_key
    FROM facts GROUP BY seq
),
timed AS (
    SELECT *, coalesce(told_due_ms, stored_due_ms, from_due_ms, shifted_ms) AS due_ms,
           accepted > 0 AND released + cancelled = 0 AS is_open, stored_seq >= moved_seq AS is_stored
    FROM folded
)
SELECT seq, topic, unique_key, due_ms, stored_due_ms, released_ms, shifted_ms, from_due_ms, accepted, released,
       cancelled,
       is_open AND NOT is_stored AS lost,
       coalesce(released_ms < CASE WHEN from_due_ms = due_ms THEN shifted_ms ELSE due_ms END, false) AS early,
       accepted > 1 OR released + cancelled > 1 OR (is_open AND is_stored AND copies > 1) AS duplicate,
       accepted = 0 AS unknown,
       coalesce(CASE WHEN released > 0 THEN coalesce(from_due_ms, shifted_ms) <> told_due_ms
                     WHEN is_open AND is_stored THEN stored_due_ms <> told_due_ms END, false) AS changed,
       is_open AND is_stored AS pending,
       coalesce(is_open AND due_ms < {overdue_before_ms}, false) AS overdue
FROM timed
"""
_OPEN_TEXT = """
SELECT grp, bit_or(bit) AS stored_bits, CAST(sum({hash}) AS BIGINT) AS stored_due_sum
FROM (SELECT seq AS n, seq - seq % {group_numbers} AS grp, {bit} AS bit, due_ms AS hashed_ms
      FROM {judged} WHERE pending) AS open_messages
GROUP BY grp
"""

# From these sums, `are_consecutive` tells whether a queue has gaps. If so, `gaps` counts them.
_QUEUES_TEXT = """
SELECT topic, queue_id, min(queue_offset) AS first, max(queue_offset) AS last, count(*) AS uses,
       CAST(sum(queue_offset % {prime}) AS BIGINT) AS sum_1,
       CAST(sum((queue_offset % {prime}) * (queue_offset % {prime}) % {prime}) AS BIGINT) AS sum_2
FROM {placed} GROUP BY topic, queue_id
"""
_GAPS_TEXT = """
SELECT topic, queue_id, first, last, last - first + 1 - positions AS missing, uses - positions AS twice
FROM (SELECT topic, queue_id, min(queue_offset) AS first, max(queue_offset) AS last, count(*) AS uses,
             count(DISTINCT queue_offset) AS positions
      FROM {placed} GROUP BY topic, queue_id) AS queues
WHERE last - first + 1 <> positions OR uses <> positions
"""


class AuditTexts:
    """Builds the texts for one engine. `relation` converts a relation's name to its form in the engine's SQL."""

    def __init__(
        self, engine: Engine, relation: Relation, *, since: int, settled_ms: int, overdue_before_ms: int
    ) -> None:
        """`since`: the first number that counts.

        `settled_ms`: the broker has settled all messages due before it, so their rows do not count as pending.
        `overdue_before_ms`: pending messages due before it are overdue.
        """
        names = ("events", "filed", "logged", "placed", "kept", "suspects", "bulk", "judged")
        self._fields = {
            **{name: relation(name) for name in names},
            "since": since,
            "settled_ms": settled_ms,
            "overdue_before_ms": overdue_before_ms,
            "group_numbers": GROUP_NUMBERS,
            "never": NEVER,
            "moved": MOVED,
            "prime": PRIME,
            "schedule_topic": SCHEDULE_TOPIC,
            "bit": _BIT[engine].format(n="n"),
            "hash": _due_hash("hashed_ms"),
            "from_hash": _due_hash("from_due_ms"),
        }

    def events(self) -> str:
        """Build the query for the sums of events, by group."""
        counts = ", ".join(
            f"CAST(count(CASE WHEN {condition} THEN 1 END) AS BIGINT) AS {name}_count"
            for name, condition in EVENT_COUNTS.items()
        )
        return _EVENTS_TEXT.format(**self._fields, counts=counts)

    def rows(self) -> str:
        """Build the query for the sums of the stored rows of pending messages, by group."""
        return _ROWS_TEXT.format(**self._fields, ended=self._ended(_MOVED_AGAIN_TEXT.format(**self._fields)))

    def ended(self) -> str:
        """Build the query for ENDED_SCHEMA, which the next audit needs."""
        return self._ended("")

    def _ended(self, moved_again: str) -> str:
        return _ENDED_TEXT.format(**self._fields, moved_again=moved_again)

    def judged(self) -> str:
        """Build the query for the messages of the suspect groups: one row each, with flags."""
        return _JUDGED_TEXT.format(**self._fields)

    def open(self) -> str:
        """Build the query for the pending messages in {judged}, by group, as `rows` returns them."""
        return _OPEN_TEXT.format(**self._fields)

    def queues(self) -> str:
        """Build the query for the sums of the positions of each queue."""
        return _QUEUES_TEXT.format(**self._fields)

    def gaps(self) -> str:
        """Build the query for the queues whose positions are not consecutive and unique."""
        return _GAPS_TEXT.format(**self._fields)

    def first_of_level(self) -> str:
        """Build the query for the first row of a message that waits for a delay level."""
        condition = "topic = '{schedule_topic}' AND due_ms >= {settled_ms}"
        return f"SELECT min(seq) AS seq FROM {{logged}} WHERE {condition}".format(**self._fields)

    def count(self, flags: tuple[str, ...]) -> str:
        """Build the query for the number of messages in {judged} with each of these flags."""
        counts = ", ".join(f"count(CASE WHEN {flag} THEN 1 END) AS {flag}" for flag in flags)
        return f"SELECT {counts} FROM {self._fields['judged']}"

    def offenders(self, flag: str, limit: int) -> str:
        """Build the query for some messages in {judged} with a flag, by number."""
        return f"SELECT * FROM {self._fields['judged']} WHERE {flag} ORDER BY seq LIMIT {limit}"


# ---- sets of numbers, as the texts build them ------------------------------------------------------------------


def bits_of_range(first: int, rows: int) -> tuple[Int64Array, Int64Array]:
    """Compute the groups that the numbers first <= n < first + rows touch, and the bits of these numbers in each.

    Returns (first numbers of the groups, bits).
    """
    end = first + rows
    groups = np.arange(first - first % GROUP_NUMBERS, end, GROUP_NUMBERS, dtype=np.int64)
    low = np.maximum(first - groups, 0)
    high = np.minimum(end - groups, GROUP_NUMBERS)
    one = np.int64(1)
    return groups, (one << high) - (one << low)


def are_consecutive(first: int, last: int, uses: int, sum_1: int, sum_2: int) -> bool:
    """Check by the result of `AuditTexts.queues` whether each position from `first` to `last` is used once.

    `uses`: the number of positions. `sum_1`, `sum_2`: the sums of the positions and of their squares, modulo PRIME.
    """

    def power_sums(end: int) -> tuple[int, int]:
        """Sum the numbers and the squares from 0 to `end`."""
        return end * (end + 1) // 2, end * (end + 1) * (2 * end + 1) // 6

    to_last, before_first = power_sums(last), power_sums(first - 1)
    return uses == last - first + 1 and all(
        (actual - (upper - lower)) % PRIME == 0
        for actual, upper, lower in zip((sum_1, sum_2), to_last, before_first, strict=True)
    )
