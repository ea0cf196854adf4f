"""The SQL texts of the views of pending messages and past events. DuckDB and Spark run the same text.

An engine supplies the relations of LOG_RELATIONS and of the tables. The texts below build the views from them. Where
the SQL dialects differ, `_SPELLINGS` or a macro contains both forms. So a query gives the same result on both engines.

    view            one row for
    pending         a pending scheduled message, with its place: table, tail or level (snapshot.py), and the due time
                    and topic that bulk operations have given it. Messages of paused campaigns and those that bulk
                    operations cancelled are left out
    pending_table   a row of the pending table, settled (released or cancelled) or not
    ledger          an event: accepted, moved, released, cancelled, started
    scheduled       a scheduled message, from acceptance to its end, and why it was late, as far back as ledger or log
                    reach
    archive         a row of the log that the archive job has stored
    log             a row of the kept log (DuckDB: only of its end)
    schedules       a recurring schedule, as it is now
    selections      a bulk operation, as it is now

Each column of milliseconds since 1970 has a twin of type timestamp, in UTC: due_ms and due, accepted_ms and accepted.

Lateness counts from the due time. If a scheduled message was already due when it was accepted, it counts from the
acceptance, and `past_ms` is the time from the due time to the acceptance. The scheduled messages of a bulk job are
accepted when their files are attached. Lateness is divided into three stages, from the log alone. The three add up to
`lateness_ms`:

    due ---- accepted ---- the log was down ---- others were being released ---- its own release
        past_ms             late_outage_ms            late_burst_ms              late_broker_ms

    outage   the broker did not run: between the last row before a stop and the first row after the next start
    burst    the broker was busy releasing other messages, up to the time of the previous release
    broker   all other causes: gathering, the previous group commit, a stall

`cause` names the largest of the three. It is null for a scheduled message that was on time, is pending or was
cancelled. The log contains nothing of later delays, in consumers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from timeball.model.message import (
    BASE,
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    TABLE_SCHEMA,
    Kind,
)
from timeball.spark.table_store import ANY_DUE_TIME, Due
from timeball.spark.views.broker_state import ARGUMENTS, reach_ms
from timeball.spark.views.snapshot import Snapshot

Engine = Literal["spark", "duckdb"]
# A relation's name -> its form in a SQL text. Spark takes DataFrames in the form {name}.
Relation = Callable[[str], str]

LAST_MS = (1 << 63) - 1
SPARK_RELATION: Relation = "{{{}}}".format


# ---- the relations that an engine supplies ------------------------------------------------------------------


@dataclass(frozen=True)
class LogRelation:
    """A relation of rows of the log: their kinds and columns."""

    kinds: tuple[Kind, ...]
    columns: tuple[str, ...]
    begin: Literal["first", "watermark"]  # the first row to read
    placed: bool | None = None  # True for only rows with a queue position, False for only rows without one


# In the views, `seq` is the number of a scheduled message: the sequence number of its first row. A message that was
# moved has this number as `number` in the table, where its `seq` is the row that set its due time.
PENDING_COLUMNS = tuple(name for name in TABLE_SCHEMA.names if name != "number")
_WAITING = ("seq", "kind", "source_seq", "version_seq", "from_due_ms", "store_ms", *PENDING_COLUMNS[1:])
LOG_RELATIONS = {
    "settled_rows": LogRelation((Kind.RELEASE, Kind.CANCEL), ("kind", "source_seq"), "first"),
    "moved_rows": LogRelation((Kind.MOVED,), ("seq", "source_seq", "from_due_ms"), "first"),
    "tail_rows": LogRelation((Kind.SCHEDULED, Kind.MOVED), _WAITING, "watermark", placed=False),
    "level_rows": LogRelation((Kind.SCHEDULED, Kind.MOVED), _WAITING, "first", placed=True),
}


def log_columns(name: str, message_columns: Sequence[str]) -> list[str]:
    """List the columns of a relation in LOG_RELATIONS. `body` is left out unless it is in `message_columns`."""
    columns = {*LOG_RELATIONS[name].columns} - ({"body"} - {*message_columns})
    return [column for column in READ_SCHEMA.names if column in columns]


# View -> its base relation.
BASES = {  # an engine supplies these, too
    "pending": "waiting_rows",
    "pending_table": "table_rows",
    "ledger": "ledger_events",
    "archive": "archive_rows",
    "log": "log_rows",
    "schedules": "schedule_rows",
    "selections": "selection_rows",
}
VIEWS = (*BASES, "scheduled")
# View -> all its base relations.
NEEDS = {**{view: (base,) for view, base in BASES.items()}, "scheduled": ("ledger_events", "waiting_rows")}


def views_in_query(text: str) -> list[str]:
    """List the views whose names occur in a query. A name in a comment or a string only costs time."""
    words = set(re.findall(r"\w+", text.lower()))
    return [view for view in VIEWS if view in words]


def base_relations_of(names: Iterable[str]) -> list[str]:
    """List the base relations of these views, each once."""
    return list(dict.fromkeys(base for name in names for base in NEEDS[name]))


# ---- pending messages ---------------------------------------------------------------------------------------

# If a scheduled message was written again, only its newest row counts, in the tail or in the table. `moves` leaves out
# moves before the watermark that kept the due time, because in the table the `seq` of these messages is the row that
# set their due time. `version` is the row that set the due time.
#
# Each subquery is referenced only once. DuckDB would materialise a subquery with two references, and then read all
# columns, even bodies, for a query that only counts.
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
    SELECT {tail_columns}, seq AS row_seq, {version} AS version FROM {tail_rows}
),
filed AS (
    SELECT {table_columns}, seq AS row_seq, seq AS version FROM {waiting_table_rows}
),
leveled AS (
    SELECT {level_columns}, seq AS row_seq, {version} AS version FROM {level_rows}
),
placed AS (
    SELECT {columns}, row_seq, version, 'table' AS place FROM filed WHERE due_ms >= {low} AND due_ms < {high}{not_held}
    UNION ALL
    SELECT {columns}, row_seq, version, 'tail' AS place FROM tail WHERE due_ms >= {low} AND due_ms < {high}
    UNION ALL
    SELECT {columns}, row_seq, version, 'level' AS place FROM leveled WHERE due_ms >= {level_low} AND due_ms < {high}
),
newest AS (
    SELECT /*+ BROADCAST(moved) */ {columns}, version, place
    FROM placed LEFT JOIN moved USING (seq) WHERE coalesce(newest_seq, row_seq) = row_seq
)
SELECT {hint} {columns}, {kept} FROM newest ANTI JOIN gone USING (seq)
"""
# The same after bulk operations, which may change the due time and the topic of a message.
_SELECTED_TEXT = """
SELECT {columns}, place FROM (SELECT *, {effect}({arguments}) AS effect FROM ({waiting}))
WHERE effect IS NOT NULL AND effect.due_ms >= {low} AND effect.due_ms < {high}{not_held}
"""
_SELECTED_COLUMNS = {
    "due_ms": "effect.due_ms AS due_ms",
    "topic": "effect.topic AS topic",
    # The last property of a wake-up is the broker's own.
    "properties": f"regexp_replace(properties, '{BASE}{PROPERTY_NAME_END}[^{PROPERTY_END}]*{PROPERTY_END}$', '')"
    " AS properties",
}
_VERSION = (
    f"CASE WHEN kind = {int(Kind.MOVED)} AND from_due_ms IS NULL"
    " THEN coalesce(version_seq, source_seq) ELSE seq END"
)
_LEVEL_PROPERTIES = (
    f"REAL_TOPIC{PROPERTY_NAME_END}([^{PROPERTY_END}]+){PROPERTY_END}"
    f"REAL_QID{PROPERTY_NAME_END}(-?[0-9]+){PROPERTY_END}$"
)
_TABLE_COLUMNS = {"seq": "coalesce(number, seq) AS seq"}
_TAIL_COLUMNS = {
    "seq": f"CASE WHEN kind = {int(Kind.MOVED)} THEN source_seq ELSE seq END AS seq",
    "accepted_ms": f"CASE WHEN kind = {int(Kind.MOVED)} THEN accepted_ms ELSE store_ms END AS accepted_ms",
}
# The row of a delay level's message has the topic and queue of the level. The real ones are in its properties.
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


def pending_sql(
    shot: Snapshot,
    columns: Sequence[str],
    due: Due = ANY_DUE_TIME,
    *,
    relation: Relation = str,
    hint: str = "",
    effect: str = "",
) -> str:
    """Build the query for the messages that are pending and due within `due`.

    The result has `columns`, a part of PENDING_COLUMNS, and `place`. The query reads the relations WAITING_RELATIONS.
    `waiting_table_rows` needs only the files with due times within `clip_to_snapshot(shot, due)`. `hint`: a hint for
    Spark's optimizer. `effect`: the name of the SQL function for the effect of bulk operations
    (broker_state.effect_of), or "" if the snapshot has none.
    """
    low, high = clip_to_snapshot(shot, due)
    # A message of a delay level can be pending although its due time is before `due_from_ms`: after the clock was set
    # back, levels still wait for their duration. So the snapshot's lower bound does not apply to levels.
    level_low = low if shot.only_cancels else max(0, (due[0] or 0) - reach_ms(shot.selections))
    settling = [Kind.CANCEL] if shot.only_cancels else [Kind.RELEASE, Kind.CANCEL]
    high = LAST_MS if high is None else high
    text = _WAITING_TEXT.format(
        **{name: relation(name) for name in WAITING_RELATIONS},
        settling=", ".join(str(int(kind)) for kind in settling),
        log_begin=min(shot.first_seq, shot.end_seq),
        columns=", ".join(columns),
        table_columns=", ".join(_TABLE_COLUMNS.get(name, name) for name in columns),
        tail_columns=", ".join(_TAIL_COLUMNS.get(name, name) for name in columns),
        level_columns=", ".join(_LEVEL_COLUMNS.get(name, name) for name in columns),
        version=_VERSION,
        kept="version, place" if effect else "place",
        watermark=shot.watermark,
        not_held=_not_paused_condition(shot),
        low=low,
        high=high,
        level_low=level_low,
        hint=hint,
    )
    if not effect:
        return text
    return _SELECTED_TEXT.format(
        columns=", ".join(_SELECTED_COLUMNS.get(name, name) for name in columns),
        effect=effect, arguments=", ".join(ARGUMENTS), waiting=text,
        low=max(due[0] or 0, shot.due_from_ms if shot.upcoming else 0),
        high=LAST_MS if due[1] is None else due[1],
        not_held=" AND NOT effect.is_held" if shot.upcoming else "",
    )  # fmt: skip


def _not_paused_condition(shot: Snapshot) -> str:
    """Build the condition that no paused campaign holds back a row of the table. Campaigns have few ranges."""
    conditions = (
        f"(row_seq >= {low} AND row_seq < {high} AND due_ms >= {from_ms})" for low, high, from_ms in shot.held
    )
    return f" AND NOT ({' OR '.join(conditions)})" if shot.held else ""


def clip_to_snapshot(shot: Snapshot, due: Due) -> tuple[int, int | None]:
    """Compute the bounds of the due times of all rows that may be of messages pending in the snapshot and due in `due`.

    Bulk operations may have given these messages other due times than their rows have. Returns (low, high):
    low <= due_ms < high. None as `high` means no bound.
    """
    (low, high), reach = due, reach_ms(shot.selections)
    low = shot.due_from_ms if low is None else max(low - reach, shot.due_from_ms)
    return low, None if high is None else min(high + reach, LAST_MS)


# ---- one row per scheduled message --------------------------------------------------------------------------

COLUMNS = (
    "seq", "topic", "unique_key", "accepted_ms", "due_ms", "released_ms", "cancelled_ms", "past_ms", "lateness_ms",
    "late_outage_ms", "late_burst_ms", "late_broker_ms", "cause", "attempts",
)  # fmt: skip

# Expressions that differ between the engines: the numbers of a range, the list of outages, and the total overlap of
# outages with the time during which a scheduled message was late.
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

_SCHEDULED_TEXT = """
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


def scheduled_sql(engine: Engine, *, events: str, waiting: str) -> str:
    """Build the query for COLUMNS, with one row per scheduled message.

    `events`: a relation with columns of EVENT_SCHEMA: event, first_seq, rows, topic, unique_key, due_ms, at_ms,
    lateness_ms, attempt and event_seq. `waiting`: a relation with seq, topic, unique_key and due_ms of pending
    messages. Both are inserted into the text without quotes, so they must not come from a user.
    """
    return _SCHEDULED_TEXT.format(
        last_seq=(1 << 63) - 1,
        events=events,
        waiting=waiting,
        schedule_topic=SCHEDULE_TOPIC,
        **_SPELLINGS[engine],
    )


# ---- the views ----------------------------------------------------------------------------------------------

# Column of milliseconds since 1970 -> its twin of type timestamp.
_TIMESTAMP_TWINS = {
    "due_ms": "due",
    "at_ms": "happened",
    "accepted_ms": "accepted",
    "born_ms": "born",
    "store_ms": "stored",
    "released_ms": "released",
    "cancelled_ms": "cancelled",
    "next_due_ms": "next_due",
    "last_due_ms": "last_due",
    "first_due_ms": "first_due",
    "last_ms": "last_run",
    "due_from_ms": "due_from",
    "due_to_ms": "due_to",
    "undone_ms": "undone",
}

DUCKDB_MACROS = ("create macro timestamp_millis(ms) as epoch_ms(ms) at time zone 'UTC'",)

# Pending messages count as events, too: the ledger may have begun after they were accepted.
_ALL_EVENTS_TEXT = """
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
    """Build {view: query} for the views whose base relations are in `columns` (relation -> its columns).

    `relation` converts a relation's name to its form in the engine's SQL.
    """
    names = {base: relation(base) for base in columns}
    queries = {
        view: _with_timestamps(names[base], columns[base]) for view, base in BASES.items() if base in names
    }
    if all(base in names for base in NEEDS["scheduled"]):
        events, waiting = _ALL_EVENTS_TEXT.format(**names), _NO_ROWS_TEXT.format(**names)
        scheduled = scheduled_sql(engine, events=events, waiting=waiting)
        queries["scheduled"] = _with_timestamps(f"(select *, {_STATE} from ({scheduled}))", COLUMNS)
    return queries


def _with_timestamps(source: str, columns: Sequence[str]) -> str:
    """Build the query for all columns of a relation, with a timestamp twin for each column in _TIMESTAMP_TWINS.

    `source`: the relation in the SQL text. `columns`: its columns.
    """
    twins = [
        f"timestamp_millis({name}) as {twin}"
        for name, twin in _TIMESTAMP_TWINS.items()
        if name in columns and twin not in columns
    ]
    return f"select {', '.join(['*', *twins])} from {source}"
