"""The views over what waits and what happened: one SQL text, which DuckDB and Spark both run.

An engine brings the relations of LOG_RELATIONS and of the tables; the texts below turn them into the views people ask.
Where the two dialects differ, `_SPELLINGS` or a macro has the difference. So a question has one answer on either.

    view            one row for
    pending         a promise that waits, with the place where it lies: table, tail or level; none that is held
    pending_table   a row of the pending table, settled or not
    ledger          an event: accepted, moved, released, cancelled, started
    promises        a promise, from acceptance to its end and why it was late, as far back as ledger or log reach
    archive         what passed, if the archive job has kept it
    log             a row of the kept log (DuckDB: of its end)

Each column of milliseconds since 1970 has a twin that is an instant in UTC: due_ms and due, accepted_ms and accepted.

Lateness counts from the instant, or from the acceptance of a promise that was due before: `past_ms` before it. Of a
bulk job, the promises are accepted when the files are attached. Lateness is told by stage, from the log alone; the
three add up to `lateness_ms`:

    due ---- accepted ---- the log was down ---- others were being released ---- its own release
        past_ms             late_outage_ms            late_burst_ms              late_broker_ms

    outage   the broker did not run: between the last row of one life and the first of the next
    burst    the broker was busy releasing others up to the instant of the release before
    broker   all other causes: gathering, the group commit before, a stall

`cause` names the largest of the three, and is null for a promise that was on time, waits or was cancelled. The log does
not know what happened behind the queue, in consumers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from timeball.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    TABLE_SCHEMA,
    Kind,
)
from timeball.pipeline.table_store import ALWAYS, Due
from timeball.pipeline.views.snapshot import Snapshot

Engine = Literal["spark", "duckdb"]
# A relation's name -> how it stands in a text; Spark takes DataFrames by {name}.
Relation = Callable[[str], str]

SPARK_RELATION: Relation = "{{{}}}".format


# ---- the relations that an engine brings --------------------------------------------------------------------


@dataclass(frozen=True)
class LogRelation:
    """Rows of the log of these kinds in these columns; `begin` names the first row that counts.

    `placed`: only rows that have a place in a queue, or only those that have none.
    """

    kinds: tuple[Kind, ...]
    columns: tuple[str, ...]
    begin: Literal["first", "watermark"]
    placed: bool | None = None


# A promise has one number here; that it may have several versions is told by the log and the table's `number`.
PENDING_COLUMNS = tuple(name for name in TABLE_SCHEMA.names if name != "number")
_WAITING = ("seq", "kind", "source_seq", "store_ms", *PENDING_COLUMNS[1:])
LOG_RELATIONS = {
    "settled_rows": LogRelation((Kind.RELEASE, Kind.CANCEL), ("kind", "source_seq"), "first"),
    "moved_rows": LogRelation((Kind.MOVED,), ("seq", "source_seq", "from_due_ms"), "first"),
    "tail_rows": LogRelation((Kind.PROMISE, Kind.MOVED), _WAITING, "watermark", placed=False),
    "level_rows": LogRelation((Kind.PROMISE, Kind.MOVED), _WAITING, "first", placed=True),
}


def log_columns(name: str, wanted: Sequence[str]) -> list[str]:
    """Return the columns of a log relation, without a body unless it is among the columns wanted of a promise."""
    columns = {*LOG_RELATIONS[name].columns} - ({"body"} - {*wanted})
    return [column for column in READ_SCHEMA.names if column in columns]


# View -> the relation it shows.
BASES = {
    "pending": "waiting_rows",
    "pending_table": "table_rows",
    "ledger": "ledger_events",
    "archive": "archive_rows",
    "log": "log_rows",
}
VIEWS = (*BASES, "promises")
NEEDS = {**{view: (base,) for view, base in BASES.items()}, "promises": ("ledger_events", "waiting_rows")}


def named(text: str) -> list[str]:
    """Return the views whose names stand in a query. A name in a comment or a string costs only time."""
    words = set(re.findall(r"\w+", text.lower()))
    return [view for view in VIEWS if view in words]


def needed_bases(names: Iterable[str]) -> list[str]:
    """Return the relations behind these views, each once."""
    return list(dict.fromkeys(base for name in names for base in NEEDS[name]))


# ---- what waits ---------------------------------------------------------------------------------------------

# Of a promise that was written again only the newest row counts, in the tail or in the table. What moved it to another
# place before the watermark is in the table under the row that gave it its instant. Each part is named once: one that
# is named twice is kept apart by DuckDB, which then reads all columns, bodies too, for a query that only counts.
_WAITING_TEXT = """
WITH gone AS (
    SELECT source_seq AS seq FROM {settled_rows} WHERE kind IN ({settling})
    UNION ALL
    SELECT first_seq AS seq FROM {ledger_rows} WHERE event = 'cancelled' AND event_seq < {log_begin}
),
moves AS (
    SELECT source_seq AS seq, seq AS row_seq FROM {moved_rows}
    WHERE from_due_ms IS NOT NULL OR seq >= {watermark}
    UNION ALL
    SELECT first_seq AS seq, event_seq AS row_seq FROM {ledger_rows}
    WHERE event = 'moved' AND event_seq < {log_begin}
),
moved AS (
    SELECT seq, max(row_seq) AS newest_seq FROM moves GROUP BY seq
),
tail AS (
    SELECT {tail_columns}, seq AS row_seq FROM {tail_rows}
),
filed AS (
    SELECT {table_columns}, seq AS row_seq FROM {waiting_table_rows}
),
leveled AS (
    SELECT {level_columns}, seq AS row_seq FROM {level_rows}
),
placed AS (
    SELECT {columns}, row_seq, 'table' AS place FROM filed WHERE due_ms >= {low} AND due_ms < {high}{not_held}
    UNION ALL
    SELECT {columns}, row_seq, 'tail' AS place FROM tail WHERE due_ms >= {low} AND due_ms < {high}
    UNION ALL
    SELECT {columns}, row_seq, 'level' AS place FROM leveled WHERE due_ms >= {level_low} AND due_ms < {high}
),
newest AS (
    SELECT /*+ BROADCAST(moved) */ {columns}, place
    FROM placed LEFT JOIN moved USING (seq) WHERE coalesce(newest_seq, row_seq) = row_seq
)
SELECT {hint} {columns}, place FROM newest ANTI JOIN gone USING (seq)
"""
_LEVEL_PROPERTIES = (
    f"REAL_TOPIC{PROPERTY_NAME_END}([^{PROPERTY_END}]+){PROPERTY_END}"
    f"REAL_QID{PROPERTY_NAME_END}(-?[0-9]+){PROPERTY_END}$"
)
_TABLE_COLUMNS = {"seq": "coalesce(number, seq) AS seq"}
_TAIL_COLUMNS = {
    "seq": f"CASE WHEN kind = {int(Kind.MOVED)} THEN source_seq ELSE seq END AS seq",
    "accepted_ms": f"CASE WHEN kind = {int(Kind.MOVED)} THEN accepted_ms ELSE store_ms END AS accepted_ms",
}
# A promise of a delay level stands in the log under the topic and queue it waits in, not the ones it is for.
_LEVEL_COLUMNS = {
    **_TAIL_COLUMNS,
    "topic": f"coalesce(nullif(regexp_extract(properties, '{_LEVEL_PROPERTIES}', 1), ''), topic) AS topic",
    "queue_id": f"coalesce(cast(nullif(regexp_extract(properties, '{_LEVEL_PROPERTIES}', 2), '') AS int), queue_id)"
    " AS queue_id",
}
WAITING_RELATIONS = (
    "settled_rows",
    "ledger_rows",
    "moved_rows",
    "tail_rows",
    "level_rows",
    "waiting_table_rows",
)


def waiting_sql(
    shot: Snapshot, columns: Sequence[str], due: Due = ALWAYS, *, relation: Relation = str, hint: str = ""
) -> str:
    """Return the query for all that waits and is due within the bounds: `columns` of PENDING_COLUMNS and `place`.

    It reads the relations WAITING_RELATIONS; `waiting_table_rows` need only have the files of clipped(shot, due).
    """
    low, high = clipped(shot, due)
    # One of a level may count as due before its instant, when the clock was set back behind its acceptance.
    level_low = low if shot.only_cancels else (due[0] or 0)
    settling = [Kind.CANCEL] if shot.only_cancels else [Kind.RELEASE, Kind.CANCEL]
    return _WAITING_TEXT.format(
        **{name: relation(name) for name in WAITING_RELATIONS},
        settling=", ".join(str(int(kind)) for kind in settling),
        log_begin=min(shot.first_seq, shot.end_seq),
        columns=", ".join(columns),
        table_columns=", ".join(_TABLE_COLUMNS.get(name, name) for name in columns),
        tail_columns=", ".join(_TAIL_COLUMNS.get(name, name) for name in columns),
        level_columns=", ".join(_LEVEL_COLUMNS.get(name, name) for name in columns),
        watermark=shot.watermark,
        not_held=_not_held(shot),
        low=low,
        high=(1 << 63) - 1 if high is None else high,
        level_low=level_low,
        hint=hint,
    )


def _not_held(shot: Snapshot) -> str:
    """Return the condition on rows of the table that no paused campaign holds them: they lie in few ranges."""
    held = (
        f"(row_seq >= {low} AND row_seq < {high} AND due_ms >= {from_ms})" for low, high, from_ms in shot.held
    )
    return f" AND NOT ({' OR '.join(held)})" if shot.held else ""


def clipped(shot: Snapshot, due: Due) -> tuple[int, int | None]:
    """Return the bounds without promises settled as of the snapshot."""
    low, high = due
    return shot.due_from_ms if low is None else max(low, shot.due_from_ms), high


# ---- one row a promise --------------------------------------------------------------------------------------

COLUMNS = (
    "seq", "topic", "unique_key", "accepted_ms", "due_ms", "released_ms", "cancelled_ms", "past_ms", "lateness_ms",
    "late_outage_ms", "late_burst_ms", "late_broker_ms", "cause", "attempts",
)  # fmt: skip

# Where the two engines spell it differently: the numbers of a range; the list of outages, and its overlap with the
# time a promise was late.
_SPELLINGS: dict[Engine, dict[str, str]] = {
    "spark": {
        "numbers": "explode(sequence(first_seq, first_seq + rows - 1))",
        "stops": "collect_list(named_struct('low', at_ms - lateness_ms, 'high', at_ms))",
        "down": "aggregate(stops, 0L, (sum, s) -> sum + "
        "greatest(0L, least(released_ms, s.high) - greatest(begin_ms, s.low)))",
    },
    "duckdb": {
        "numbers": "unnest(range(first_seq, first_seq + rows))",
        "stops": "coalesce(list({'low': at_ms - lateness_ms, 'high': at_ms}), [])",
        "down": "coalesce(list_sum(list_transform(stops, lambda s: "
        "greatest(0, least(released_ms, s.high) - greatest(begin_ms, s.low)))), 0)",
    },
}

_PROMISES_TEXT = """
WITH witnessed AS (
    SELECT {numbers} AS seq, event, topic, unique_key, due_ms, at_ms, lateness_ms, attempt, event_seq
    FROM {events} WHERE event <> 'started'
    UNION ALL
    SELECT seq, NULL, topic, unique_key, due_ms, NULL, NULL, NULL, NULL FROM {waiting}
),
folded AS (
    SELECT seq,
           coalesce(max(CASE WHEN topic <> '{schedule_topic}' THEN topic END), max(topic)) AS topic,
           max(unique_key) AS unique_key,
           min(CASE WHEN event = 'accepted' THEN at_ms END) AS accepted_ms,
           max_by(due_ms, coalesce(event_seq, {last_seq})) AS due_ms,
           min(CASE WHEN event = 'released' THEN at_ms END) AS released_ms,
           min(CASE WHEN event = 'cancelled' THEN at_ms END) AS cancelled_ms,
           max(lateness_ms) AS lateness_ms,
           max(attempt) AS attempts
    FROM witnessed GROUP BY seq HAVING count(event) > 0
),
instants AS (
    SELECT at_ms, lag(at_ms) OVER (PARTITION BY floor(at_ms / 86400000) ORDER BY at_ms) AS previous_ms
    FROM (SELECT DISTINCT at_ms FROM {events} WHERE event = 'released') AS releases
),
outages AS (SELECT {stops} AS stops FROM {events} WHERE event = 'started'),
timed AS (
    SELECT *, greatest(due_ms, coalesce(accepted_ms, due_ms)) AS begin_ms FROM folded
),
begun AS (
    SELECT seq, topic, unique_key, accepted_ms, due_ms, released_ms, cancelled_ms, attempts, begin_ms,
           greatest(0, begin_ms - due_ms) AS past_ms,
           CASE WHEN lateness_ms IS NOT NULL
                THEN greatest(0, least(lateness_ms, timed.released_ms - begin_ms)) END AS lateness_ms,
           stops, previous_ms
    FROM timed CROSS JOIN outages LEFT JOIN instants ON timed.released_ms = instants.at_ms
),
down AS (
    SELECT *, CASE WHEN lateness_ms > 0 THEN least(lateness_ms, {down}) END AS late_outage_ms FROM begun
),
busy AS (
    SELECT *, least(lateness_ms - late_outage_ms,
                    greatest(0, coalesce(previous_ms, 0) - begin_ms - late_outage_ms)) AS late_burst_ms
    FROM down
),
told AS (
    SELECT *, lateness_ms - late_outage_ms - late_burst_ms AS late_broker_ms FROM busy
)
SELECT seq, topic, unique_key, accepted_ms, due_ms, released_ms, cancelled_ms,
       CAST(past_ms AS BIGINT) AS past_ms,
       CAST(lateness_ms AS BIGINT) AS lateness_ms,
       CAST(late_outage_ms AS BIGINT) AS late_outage_ms,
       CASE WHEN lateness_ms > 0 THEN CAST(late_burst_ms AS BIGINT) END AS late_burst_ms,
       CASE WHEN lateness_ms > 0 THEN CAST(late_broker_ms AS BIGINT) END AS late_broker_ms,
       CASE WHEN lateness_ms > 0 THEN
            CASE greatest(late_outage_ms, late_burst_ms, late_broker_ms)
                 WHEN late_outage_ms THEN 'outage' WHEN late_burst_ms THEN 'burst' ELSE 'broker' END
       END AS cause,
       attempts
FROM told
"""


def promises_sql(engine: Engine, *, events: str, waiting: str) -> str:
    """Return the query for COLUMNS. `events`: relation of EVENT_SCHEMA; `waiting`: seq, topic, unique_key, due_ms.

    Names of relations are put into the text as they are: they are ours, not a user's.
    """
    return _PROMISES_TEXT.format(
        last_seq=(1 << 63) - 1,
        events=events,
        waiting=waiting,
        schedule_topic=SCHEDULE_TOPIC,
        **_SPELLINGS[engine],
    )


# ---- the views ----------------------------------------------------------------------------------------------

_INSTANTS = {
    "due_ms": "due",
    "at_ms": "happened",
    "accepted_ms": "accepted",
    "born_ms": "born",
    "store_ms": "stored",
    "released_ms": "released",
    "cancelled_ms": "cancelled",
}

DUCKDB_MACROS = ("create macro timestamp_millis(ms) as epoch_ms(ms) at time zone 'UTC'",)

# What still waits counts as witnessed: the ledger may have begun after it was accepted.
_WITNESSED_TEXT = """
    (select event, first_seq, rows, topic, unique_key, due_ms, at_ms, lateness_ms, attempt, event_seq
     from {ledger_events}
     union all
     select 'waiting' as event, seq as first_seq, cast(1 as bigint) as rows, topic, unique_key, due_ms,
            cast(null as bigint) as at_ms, cast(null as bigint) as lateness_ms, cast(null as int) as attempt,
            cast(null as bigint) as event_seq
     from {waiting_rows})
"""
_NO_ROWS_TEXT = "(select seq, topic, unique_key, due_ms from {waiting_rows} where 1 = 0)"
_STATE = """
    case when released_ms is not null then 'released' when cancelled_ms is not null then 'cancelled'
         else 'waiting' end as state
"""


def definitions(
    engine: Engine, columns: Mapping[str, Sequence[str]], relation: Relation = str
) -> dict[str, str]:
    """Return view -> query, for the relations of BASES there are, given with their columns."""
    at = {base: relation(base) for base in columns}
    found = {view: _with_instants(at[base], columns[base]) for view, base in BASES.items() if base in at}
    if all(base in at for base in NEEDS["promises"]):
        events, waiting = _WITNESSED_TEXT.format(**at), _NO_ROWS_TEXT.format(**at)
        folded = promises_sql(engine, events=events, waiting=waiting)
        found["promises"] = _with_instants(f"(select *, {_STATE} from ({folded}))", COLUMNS)
    return found


def _with_instants(source: str, columns: Sequence[str]) -> str:
    """Return the query for all columns of a relation, and a twin for each that holds milliseconds."""
    twins = [
        f"timestamp_millis({name}) as {twin}"
        for name, twin in _INSTANTS.items()
        if name in columns and twin not in columns
    ]
    return f"select {', '.join(['*', *twins])} from {source}"
