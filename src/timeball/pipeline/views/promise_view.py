"""One row a promise, with what made it late: the ledger's events folded by one SQL text that two engines understand.

Lateness is told by stage, from the log alone; the four add up to `lateness_ms`:

    due ---- accepted ---- the log was down ---- others were being released ---- its own release
        late_accept_ms      late_outage_ms            late_burst_ms              late_broker_ms

    accept   it was due before it was accepted; of a bulk job, before the files were attached
    outage   the broker did not run: between the last row of one life and the first of the next
    burst    the broker was busy releasing others up to the instant of the release before
    broker   what is left: gathering, the group commit before, a stall

`cause` names the largest of the four, and is null for what was on time, waits or was cancelled. What happened behind
the queue, in consumers, is not in the log.
"""

from __future__ import annotations

from typing import Literal

from timeball.message import SCHEDULE_TOPIC

Engine = Literal["spark", "duckdb"]

COLUMNS = (
    "seq", "topic", "unique_key", "accepted_ms", "due_ms", "released_ms", "cancelled_ms", "lateness_ms",
    "late_accept_ms", "late_outage_ms", "late_burst_ms", "late_broker_ms", "cause", "attempts",
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

_TEXT = """
WITH witnessed AS (
    SELECT {numbers} AS seq, event, topic, unique_key, due_ms, at_ms, lateness_ms, attempt
    FROM {events} WHERE event <> 'started'
    UNION ALL
    SELECT seq, NULL, topic, unique_key, due_ms, NULL, NULL, NULL FROM {waiting}
),
folded AS (
    SELECT seq,
           coalesce(max(CASE WHEN topic <> '{schedule_topic}' THEN topic END), max(topic)) AS topic,
           max(unique_key) AS unique_key,
           min(CASE WHEN event = 'accepted' THEN at_ms END) AS accepted_ms,
           max(due_ms) AS due_ms,
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
begun AS (
    SELECT folded.*, stops, previous_ms,
           greatest(0, least(lateness_ms, coalesce(accepted_ms, due_ms) - due_ms)) AS late_accept_ms,
           greatest(due_ms, coalesce(accepted_ms, due_ms)) AS begin_ms
    FROM folded CROSS JOIN outages LEFT JOIN instants ON folded.released_ms = instants.at_ms
),
down AS (
    SELECT *, CASE WHEN lateness_ms > 0 THEN least(lateness_ms - late_accept_ms, {down}) END AS late_outage_ms
    FROM begun
),
busy AS (
    SELECT *, least(lateness_ms - late_accept_ms - late_outage_ms,
                    greatest(0, coalesce(previous_ms, 0) - begin_ms - late_outage_ms)) AS late_burst_ms
    FROM down
),
told AS (
    SELECT *, lateness_ms - late_accept_ms - late_outage_ms - late_burst_ms AS late_broker_ms FROM busy
)
SELECT seq, topic, unique_key, accepted_ms, due_ms, released_ms, cancelled_ms, lateness_ms,
       CASE WHEN lateness_ms > 0 THEN late_accept_ms END AS late_accept_ms,
       CAST(late_outage_ms AS BIGINT) AS late_outage_ms,
       CASE WHEN lateness_ms > 0 THEN CAST(late_burst_ms AS BIGINT) END AS late_burst_ms,
       CASE WHEN lateness_ms > 0 THEN CAST(late_broker_ms AS BIGINT) END AS late_broker_ms,
       CASE WHEN lateness_ms > 0 THEN
            CASE greatest(late_accept_ms, late_outage_ms, late_burst_ms, late_broker_ms)
                 WHEN late_accept_ms THEN 'accept' WHEN late_outage_ms THEN 'outage'
                 WHEN late_burst_ms THEN 'burst' ELSE 'broker' END
       END AS cause,
       attempts
FROM told
"""


def promises_sql(engine: Engine, *, events: str, waiting: str) -> str:
    """A query with COLUMNS. `events`: relation of LEDGER_SCHEMA; `waiting`: seq, topic, unique_key, due_ms.

    Names of relations are put into the text as they are: they are ours, not a user's.
    """
    return _TEXT.format(events=events, waiting=waiting, schedule_topic=SCHEDULE_TOPIC, **_SPELLINGS[engine])
