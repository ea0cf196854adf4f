"""Tests of timeball.spark.views.duckdb_session with several groups in one session."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.traffic import send, send_due_now
from tests.spark.two_groups import two_groups

from timeball.model.errors import NotFound, RequestError, SetupError
from timeball.spark.views.duckdb_session import SqlSession, union_of_groups
from timeball.spark.views.view_sql import VIEWS


def test_union_has_the_rows_of_all_groups() -> None:
    assert union_of_groups({"g1": "select 1", "g2": "select 2"}) == (
        "select *, 'g1' as \"group\" from (select 1) union all by name "
        "select *, 'g2' as \"group\" from (select 2)"
    )


def test_every_view_has_the_rows_of_all_groups_and_says_which(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        for node, rows in ((groups.one, 5), (groups.other, 3)):
            send(node.endpoint, rows)
            send_due_now(node.endpoint, 2)
        groups.add()
        with groups.other.client() as ball:
            ball.send("orders", "unwanted", after="1h", keys="k")
            ball.cancel(key="k")

        with SqlSession(groups.endpoint) as session:

            def count(view: str) -> dict[str, int]:
                answer = session.run(f'select "group", count(*) as n from {view} group by all')
                return {row["group"]: row["n"] for row in answer.rows.read_all().to_pylist()}

            assert count("pending") == {"g1": 5, "g2": 3}
            assert count("scheduled") == {"g1": 7, "g2": 6}
            states = session.run(
                """select "group", state, count(*) as n from scheduled group by all order by all"""
            )
            assert [tuple(row.values()) for row in states.rows.read_all().to_pylist()] == [
                ("g1", "released", 2), ("g1", "waiting", 5),
                ("g2", "cancelled", 1), ("g2", "released", 2), ("g2", "waiting", 3),
            ]  # fmt: skip
            assert count("ledger")["g1"] >= 9 and count("log")["g2"] > 5
            for view in ("pending_table", "schedules", "selections"):
                assert count(view) == {}
            assert session.due_load().total == 8
            version = session.version
            assert version.table is None and isinstance(version.groups, dict)
            assert set(version.groups) == {"g1", "g2"} and version.groups["g2"].log_end > 5
            with pytest.raises(NotFound, match="pending table of group g1; 'timeball pipeline run archive'"):
                session.run("select * from archive")
            assert len(VIEWS) == 8, "all were asked"

        with SqlSession(f"{groups.endpoint}#g2") as session:
            answer = session.run("select count(*) as n from pending")
            assert answer.rows.read_all().to_pylist() == [{"n": 3}]
            assert "group" not in session.run("select * from pending").rows.schema.names
        with pytest.raises(RequestError, match="version 0: each of the 2 groups has its own"):
            SqlSession(groups.endpoint, version=0)
        with pytest.raises(SetupError, match="--table-uri=/x: each of the 2 groups has a table of its own"):
            SqlSession(groups.endpoint, table_uri="/x")
