"""`timeball sql`: rows as a table, CSV and JSON, and the version they are of."""

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball
from timeball.cli.output import ExitCode
from timeball.cli.sql import lines, plain

BY_TOPIC = "select topic, count(*) as waiting, min(due) as first from pending group by topic order by topic"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("sql") / "d", compact_rows=0) as running:
        with Timeball(running.endpoint) as ball:
            ball.send_many([{"topic": "mail", "body": f"m{i}", "after": "10000s"} for i in range(3)])
            ball.compact()
            ball.send("bills", b"\xff\x00", after="1d")
        yield running


def test_a_table_for_people_and_its_version_beside_it(node: RunningNode) -> None:
    done = run_here("sql", BY_TOPIC, "--endpoint", node.endpoint)
    assert done.returncode == 0, done.stderr
    head, line, *rows = done.stdout.splitlines()
    assert head.split() == ["topic", "waiting", "first"]
    assert set(line) == {"─", " "}
    assert [row.split()[:2] for row in rows] == [["bills", "1"], ["mail", "3"]]
    assert "pending table 1, log to row" in done.stderr


def test_json_has_version_and_rows(node: RunningNode) -> None:
    done = run_here("sql", BY_TOPIC, "--json", "--endpoint", node.endpoint)
    found = json.loads(done.stdout)
    assert found["version"]["table"] == 1
    assert [(row["topic"], row["waiting"]) for row in found["rows"]] == [("bills", 1), ("mail", 3)]
    assert found["rows"][0]["first"].endswith("Z")


def test_csv_has_all_rows(node: RunningNode, tmp_path: Path) -> None:
    query = tmp_path / "q.sql"
    query.write_text("select topic, body from pending order by seq -- all of them\n")
    done = run_here("sql", "--file", str(query), "--csv", "--endpoint", node.endpoint)
    assert list(csv.reader(io.StringIO(done.stdout))) == [
        ["topic", "body"], ["mail", "m0"], ["mail", "m1"], ["mail", "m2"], ["bills", "\\xff00"],
    ]  # fmt: skip
    piped = run_here("sql", "--file", "-", "--csv", "--endpoint", node.endpoint, text=query.read_text())
    assert piped.stdout == done.stdout


def test_a_long_answer_is_cut_and_says_so(node: RunningNode) -> None:
    done = run_here("sql", "from range(100)", "--limit-rows", "3", "--endpoint", node.endpoint)
    assert [line.strip() for line in done.stdout.splitlines()[2:]] == ["0", "1", "2"]
    assert "the first 3 rows" in done.stderr
    done = run_here("sql", "from range(3)", "--limit-rows", "3", "--endpoint", node.endpoint)
    assert "the first" not in done.stderr


def test_without_a_query_the_views_are_shown() -> None:
    done = run_here("sql")
    shown = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert list(shown) == ["pending", "pending_table", "ledger", "archive", "log", "scheduled"]
    assert "due_ms" in shown["pending"] and ", due," in shown["pending"]
    found = json.loads(run_here("sql", "--json").stdout)["views"]
    assert {"seq", "state", "cause", "released"} <= set(found["scheduled"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["select * from nowhere"], ExitCode.USAGE, "views: pending, pending_table"),
        (["delete from pending"], ExitCode.USAGE, "only SELECT"),
        (["select 1", "--version", "9"], ExitCode.USAGE, "no version 9"),
        (["select 1", "--table-uri", "/nowhere/pending"], ExitCode.SETUP, "/nowhere/pending"),
        (["select 1", "--file", "x.sql"], ExitCode.USAGE, "--file"),
        (["--file", "/nowhere/x.sql"], ExitCode.SETUP, "--file /nowhere/x.sql"),
        (["select 1", "--memory", "much"], ExitCode.USAGE, "--memory"),
        (["select list(i) from range(100000000) t(i)", "--memory", "64MiB"], ExitCode.STORAGE, "memory"),
    ],
)
def test_errors_are_sentences(node: RunningNode, arguments: list[str], code: ExitCode, said: str) -> None:
    done = run_here("sql", *arguments, "--endpoint", node.endpoint)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def test_no_broker_is_told_with_its_address() -> None:
    done = run_here("sql", "select 1", "--endpoint", "grpc://127.0.0.1:1")
    assert done.returncode == ExitCode.UNREACHABLE
    assert "no broker answers at grpc://127.0.0.1:1" in done.stderr


def test_values_are_converted_for_json() -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    given = [
        b"text",
        b"\xff",
        moment,
        moment.date(),
        Decimal("12"),
        Decimal("1.5"),
        [b"a"],
        {"k": b"b"},
        None,
    ]
    assert [plain(value) for value in given] == [
        "text", "\\xff", "2030-01-02T03:04:05Z", "2030-01-02", 12, 1.5, ["a"], {"k": "b"}, None,
    ]  # fmt: skip


def test_lines_are_aligned_and_what_cannot_be_shown_is_not() -> None:
    shown = list(lines(["name", "n"], [["a\nb", 5], ["x" * 100, 1_000], [None, None]]))
    assert shown[0].endswith("     n")
    assert shown[2].startswith("a·b ") and shown[2].endswith("     5")
    assert shown[3].split()[0] == "x" * 59 + "…"
    assert shown[4] == ""
