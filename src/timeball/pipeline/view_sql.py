"""The views over what waits and what happened, as SQL text that both DuckDB and Spark read.

An engine brings the base relations of `BASES`; `definitions` turns their columns into the views people ask. What the
two dialects do not share (instants from milliseconds, a range as rows) has one spelling here, Spark's; DuckDB gets
it by the `DUCKDB_MACROS`. So a question has one answer, whoever is asked.

    view            one row for
    pending         a promise that waits, with the place where it lies: table, tail or level
    pending_table   a row of the pending table, settled or not
    ledger          an event: accepted, released, cancelled
    promises        a promise, from acceptance to its end, as far back as ledger or log reach
    archive         what passed, if the archive job has kept it
    log             a row of the kept log (DuckDB: of its end)

Each column of milliseconds since 1970 has a twin that is an instant in UTC: due_ms and due, accepted_ms and accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from timeball.message import SCHEDULE_TOPIC

# View -> the base relation it stands on.
BASES = {
    "pending": "waiting_rows",
    "pending_table": "table_rows",
    "ledger": "ledger_events",
    "archive": "archive_rows",
    "log": "log_rows",
}
VIEWS = (*BASES, "promises")
NEEDS = {**{view: (base,) for view, base in BASES.items()}, "promises": ("ledger_events", "waiting_rows")}

_INSTANTS = {
    "due_ms": "due",
    "at_ms": "happened",
    "accepted_ms": "accepted",
    "born_ms": "born",
    "store_ms": "stored",
    "released_ms": "released",
    "cancelled_ms": "cancelled",
}

DUCKDB_MACROS = (
    "create macro timestamp_millis(ms) as epoch_ms(ms) at time zone 'UTC'",
    "create macro sequence(low, high) as generate_series(low, high)",
    "create macro explode(items) as unnest(items)",
)

# Events as rows of one promise each. Most are so already; a bulk attach says in one row what a million were promised.
_EVENTS = """
    select first_seq as seq, event, topic, unique_key, due_ms, at_ms, lateness_ms, attempt
    from ledger_events where rows = 1
    union all
    select explode(sequence(first_seq, first_seq + rows - 1)) as seq,
           event, topic, unique_key, due_ms, at_ms, lateness_ms, attempt
    from ledger_events where rows > 1
    union all
    select seq, 'waiting' as event, topic, unique_key, due_ms, accepted_ms as at_ms,
           cast(null as bigint) as lateness_ms, cast(null as int) as attempt
    from waiting_rows
"""
# A promise of a delay level stands in a topic of its own while it waits; the other one is what it is for.
_FOLDED = f"""
    select seq,
           coalesce(max(case when topic <> '{SCHEDULE_TOPIC}' then topic end), max(topic)) as topic,
           max(unique_key) as unique_key,
           min(case when event in ('accepted', 'waiting') then at_ms end) as accepted_ms,
           max(due_ms) as due_ms,
           min(case when event = 'released' then at_ms end) as released_ms,
           min(case when event = 'cancelled' then at_ms end) as cancelled_ms,
           max(lateness_ms) as lateness_ms,
           max(attempt) as attempts,
           count(case when event = 'waiting' then 1 end) as places
    from ({_EVENTS}) group by seq
"""
_PROMISES = f"""
    select seq, topic, unique_key,
           case when released_ms is not null then 'released'
                when cancelled_ms is not null then 'cancelled'
                when places > 0 then 'waiting'
                else 'unknown' end as state,
           accepted_ms, due_ms, released_ms, cancelled_ms, lateness_ms, attempts
    from ({_FOLDED})
"""
_PROMISE_INSTANTS = ("accepted_ms", "due_ms", "released_ms", "cancelled_ms")


def named(text: str) -> list[str]:
    """The views whose names stand in a query. A name in a comment or a string counts too, and costs only time."""
    words = set(re.findall(r"\w+", text.lower()))
    return [view for view in VIEWS if view in words]


def needed_bases(names: Iterable[str]) -> list[str]:
    """The base relations behind these views."""
    return list(dict.fromkeys(base for name in names for base in NEEDS[name]))


def definitions(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """View -> its query, for the base relations there are, given with their columns."""
    found = {view: _with_instants(base, columns[base]) for view, base in BASES.items() if base in columns}
    if all(base in columns for base in NEEDS["promises"]):
        found["promises"] = _with_instants(f"({_PROMISES})", _PROMISE_INSTANTS)
    return found


def _with_instants(source: str, columns: Sequence[str]) -> str:
    """All columns of a relation, and a twin for each that holds milliseconds."""
    twins = [
        f"timestamp_millis({name}) as {twin}"
        for name, twin in _INSTANTS.items()
        if name in columns and twin not in columns
    ]
    return f"select {', '.join(['*', *twins])} from {source}"
