"""The views over what waits and what happened, as SQL text that both DuckDB and Spark read.

An engine brings the base relations of `BASES`; `definitions` turns their columns into the views people ask. What the
two dialects do not share has one spelling here, Spark's, which DuckDB gets by the `DUCKDB_MACROS`; the fold of events
into promises is promise_view's. So a question has one answer, whoever is asked.

    view            one row for
    pending         a promise that waits, with the place where it lies: table, tail or level
    pending_table   a row of the pending table, settled or not
    ledger          an event: accepted, released, cancelled, started
    promises        a promise, from acceptance to its end and why it was late, as far back as ledger or log reach
    archive         what passed, if the archive job has kept it
    log             a row of the kept log (DuckDB: of its end)

Each column of milliseconds since 1970 has a twin that is an instant in UTC: due_ms and due, accepted_ms and accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from timeball.pipeline.views.promise_view import COLUMNS, Engine, promises_sql

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

DUCKDB_MACROS = ("create macro timestamp_millis(ms) as epoch_ms(ms) at time zone 'UTC'",)

# What still waits counts as witnessed: the ledger may have begun after it was accepted.
_WITNESSED = """
    (select event, first_seq, rows, topic, unique_key, due_ms, at_ms, lateness_ms, attempt from ledger_events
     union all
     select 'waiting' as event, seq as first_seq, cast(1 as bigint) as rows, topic, unique_key, due_ms,
            cast(null as bigint) as at_ms, cast(null as bigint) as lateness_ms, cast(null as int) as attempt
     from waiting_rows)
"""
_NOBODY = "(select seq, topic, unique_key, due_ms from waiting_rows where 1 = 0)"
_STATE = """
    case when released_ms is not null then 'released'
         when cancelled_ms is not null then 'cancelled'
         else 'waiting' end as state
"""


def named(text: str) -> list[str]:
    """The views whose names stand in a query. A name in a comment or a string counts too, and costs only time."""
    words = set(re.findall(r"\w+", text.lower()))
    return [view for view in VIEWS if view in words]


def needed_bases(names: Iterable[str]) -> list[str]:
    """The base relations behind these views."""
    return list(dict.fromkeys(base for name in names for base in NEEDS[name]))


def definitions(engine: Engine, columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """View -> its query, for the base relations there are, given with their columns."""
    found = {view: _with_instants(base, columns[base]) for view, base in BASES.items() if base in columns}
    if all(base in columns for base in NEEDS["promises"]):
        folded = promises_sql(engine, events=_WITNESSED, waiting=_NOBODY)
        found["promises"] = _with_instants(f"(select *, {_STATE} from ({folded}))", COLUMNS)
    return found


def _with_instants(source: str, columns: Sequence[str]) -> str:
    """All columns of a relation, and a twin for each that holds milliseconds."""
    twins = [
        f"timestamp_millis({name}) as {twin}"
        for name, twin in _INSTANTS.items()
        if name in columns and twin not in columns
    ]
    return f"select {', '.join(['*', *twins])} from {source}"
