"""Tests of timeball.spark.views.duckdb_session: one version, and only the views of Timeball."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import send, send_due_now, visible

from timeball.model.errors import NotFound, OverLimit, RequestError
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.spark.views import due_histogram
from timeball.spark.views.duckdb_session import SqlSession


@pytest.fixture(scope="module")
def traffic_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Ten messages in the table (one cancelled), three released, one in the tail, one cancelled in the tail."""
    with running_node(tmp_path_factory.mktemp("sql") / "data", compact_rows=0) as node:
        send(node.endpoint, 10)  # numbers 2 to 11
        node.run(node.broker.compact())
        send_due_now(node.endpoint, 3)
        with node.client() as ball:
            ball.send("mail", b"tail", after="1d", tag="blue")
            ball.cancel(ids=[ball.send("mail", b"gone", after="1d").id])
            ball.send("plain", b"at once")
        node.run(node.broker.cancel(seqs=[4]))
        yield node


def test_the_time_from_a_due_time_to_a_later_acceptance_is_no_lateness(node: RunningNode) -> None:
    with node.client() as ball:
        past_ms = ball.status()["now_ms"] - DAY_MS
        ball.send("overdue", b"x", at=past_ms)
        eventually(lambda: visible(ball, "overdue") == 1, "it is released")
    text = "select due_ms, past_ms, lateness_ms from scheduled where topic = 'overdue'"
    ((due_ms, to_acceptance_ms, lateness_ms),) = ask(node, text)
    assert due_ms == past_ms and to_acceptance_ms >= DAY_MS and lateness_ms < HOUR_MS
    for text in (
        "select lateness_ms from ledger where topic = 'overdue' and event = 'released'",
        "select store_ms - greatest(due_ms, accepted_ms) from log where topic = 'overdue' and kind = 4",
    ):
        ((lateness_ms,),) = ask(node, text)
        assert lateness_ms < HOUR_MS


def ask(node: RunningNode, text: str, **options: Any) -> list[tuple[Any, ...]]:
    """Run a query in a new session with these options. Returns its rows."""
    with SqlSession(node.endpoint, **options) as session:
        rows = session.run(text).rows.read_all()
        return list(zip(*[column.to_pylist() for column in rows.columns], strict=True))


ANSWERS: dict[str, list[tuple[Any, ...]]] = {  # query -> its rows
    "select place, count(*) from pending group by place order by place": [("table", 9), ("tail", 1)],
    "select count(*), min(seq), max(seq) from pending_table": [(10, 2, 11)],
    "select event, sum(rows) from ledger group by event order by event": [
        ("accepted", 15), ("cancelled", 2), ("released", 3),
    ],
    "select state, count(*) from scheduled group by state order by state": [
        ("cancelled", 2), ("released", 3), ("waiting", 10),
    ],
    "select count(*) from log where kind = 1": [(1,)],
    "select topic, tag, body from pending where place = 'tail'": [("mail", "blue", b"tail")],
    "select count(*) from pending a join pending b using (seq)": [(10,)],
    "select count(*) from scheduled where released >= due and lateness_ms >= 0 and accepted < due": [(3,)],
    "select epoch_ms(min(due)) - min(due_ms) from pending": [(0,)],
    "select 1 as one": [(1,)],
}  # fmt: skip


@pytest.mark.parametrize("query", ANSWERS)
def test_a_query_on_the_views_has_the_right_answer(traffic_node: RunningNode, query: str) -> None:
    assert ask(traffic_node, query) == ANSWERS[query]


@pytest.mark.parametrize("expression", ["count(*)", "min(due)", "sum(octet_length(body))"])
def test_no_column_is_read_that_a_query_does_not_name(traffic_node: RunningNode, expression: str) -> None:
    """Bodies are most of a table. The last expression is the control: it names them."""
    ((_, plan),) = ask(traffic_node, f"explain select {expression} from pending where due_ms > 0")
    scans = re.findall(r"Projections:[^╰]*", plan)
    assert any("body" in scan for scan in scans) == ("body" in expression) and "due_ms" in plan
    # With a RIGHT join, DuckDB would hold all pending messages in memory to join them with the few moved ones.
    assert "Join Type: LEFT" in plan and "Join Type: RIGHT" not in plan


def test_one_version_for_all_questions_of_a_session(traffic_node: RunningNode) -> None:
    """A message that is sent meanwhile is not in it."""
    with SqlSession(traffic_node.endpoint) as session:
        count = "select count(*) from pending"
        before = session.run(count).rows.read_all().to_pylist()
        seq = traffic_node.run(
            traffic_node.broker.send(pa.record_batch({"topic": ["x"], "body": [b"x"], "delay_ms": [10**9]}))
        ).first_seq
        answer = session.run("select count(*) as n from scheduled where state = 'waiting'")
        assert answer.rows.read_all().to_pylist() == [{"n": 10}]
        assert answer.version == session.version
        assert session.run(count).rows.read_all().to_pylist() == before
    assert ask(traffic_node, count) == [(11,)]  # the control: another session, another version
    traffic_node.run(traffic_node.broker.cancel(seqs=[seq]))


def test_an_older_version_has_the_messages_of_its_time(traffic_node: RunningNode) -> None:
    assert ask(traffic_node, "select count(*) from pending", version=0) == [(0,)]
    with pytest.raises(NotFound, match="no version 77"):
        ask(traffic_node, "select 1", version=77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "select * from nowhere",
            "views: pending, pending_table, ledger, archive, log, schedules, selections, scheduled",
        ),
        ("select nosuch from pending", 'column "nosuch" not found'),
        ("selct 1", "syntax error"),
        ("", "0 statements"),
        ("select 1; select 2", "2 statements: one query at a time"),
        ("drop view pending", r"only SELECT: .*DROP"),
        ("create table x(a int)", "only SELECT"),
        ("copy (select 1) to '/tmp/timeball-x.csv'", "only SELECT"),
        ("select * from read_csv('/etc/passwd')", "disabled by configuration"),
        ("select * from '/etc/passwd'", "does not exist"),
        ("select * from pending where due = 'tuesday'", "invalid timestamp"),
    ],
)
def test_a_bad_query_raises_an_error_of_one_line(traffic_node: RunningNode, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ask(traffic_node, text)
    assert "\n" not in str(caught.value)


def test_missing_archive_names_the_job_that_makes_it(traffic_node: RunningNode) -> None:
    with pytest.raises(NotFound, match="timeball pipeline run archive"):
        ask(traffic_node, "select * from archive")


@pytest.mark.parametrize("by_topic", [False, True])
def test_a_load_of_too_many_seconds_is_counted_coarser(
    traffic_node: RunningNode, monkeypatch: pytest.MonkeyPatch, by_topic: bool
) -> None:
    with SqlSession(traffic_node.endpoint, upcoming=True, bodies=False) as session:
        fine = session.due_load(by_topic=by_topic)
        monkeypatch.setattr(due_histogram, "CELLS_MAX", fine.cells - 1)
        coarse = session.due_load(by_topic=by_topic)
    assert (fine.width_s, fine.total) == (1, 10)
    assert coarse.width_s > 1 and coarse.total == 10 and coarse.topics == fine.topics


def test_hours_are_in_utc_in_every_time_zone(
    traffic_node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB truncates times in the zone of the session, which must not be that of the machine."""
    monkeypatch.setenv("TZ", "America/New_York")
    times_s = [1_793_511_000, 1_793_514_600]  # 01:30 in New York, before and after clocks go back
    hours = ", ".join(f"epoch(date_trunc('hour', to_timestamp({time_s}))) - {time_s}" for time_s in times_s)
    assert ask(traffic_node, f"select {hours}, current_setting('TimeZone')") == [(-1_800, -1_800, "UTC")]


def test_a_query_that_needs_more_memory_than_allowed_is_refused(traffic_node: RunningNode) -> None:
    text = "select list(i) from range(100000000) t(i)"
    with pytest.raises(OverLimit, match="more than 67,108,864 bytes"):
        ask(traffic_node, text, memory_bytes=64 << 20)


def test_ctrl_c_stops_the_query_and_the_session_stays_usable(traffic_node: RunningNode) -> None:
    """Otherwise a query of hours would delay the next one."""
    endless = "select count(*) from range(1000000) a join range(1000000) b on a.range % 13 = b.range % 13"
    with SqlSession(traffic_node.endpoint) as session:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            session.run(endless).rows.read_all()
        timer.join()
        assert session.run("select 1 as one").rows.read_all().to_pylist() == [{"one": 1}]
