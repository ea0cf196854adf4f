"""`timeball sql` and `timeball pending`: rows and counts of messages where they are stored."""

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import RunningNode, running_node
from tests.written_again import apply_retention, fill_segment, write_again

from timeball.cli.output import ExitCode
from timeball.cli.sql import BARS_MAX, BarWidth, PendingCounts, count_waiting, lines, plain
from timeball.io.clock import ManualClock
from timeball.model.config import MIB

BY_TOPIC = "select topic, count(*) as waiting, min(due) as first from pending group by topic order by topic"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A broker with three messages for `mail` in the pending table, and one for `bills` in the tail of the log."""
    with running_node(tmp_path_factory.mktemp("sql") / "d", compact_rows=0) as running:
        with running.client() as ball:
            ball.send_many([{"topic": "mail", "body": f"m{i}", "after": "10000s"} for i in range(3)])
            ball.compact()
            ball.send("bills", b"\xff\x00", after="1d")
        yield running


def test_a_table_is_on_stdout_and_its_version_on_stderr(node: RunningNode) -> None:
    result = run_here("sql", BY_TOPIC, "--endpoint", node.endpoint)
    assert result.returncode == 0, result.stderr
    head, line, *rows = result.stdout.splitlines()
    assert head.split() == ["topic", "waiting", "first"]
    assert set(line) == {"─", " "}
    assert [row.split()[:2] for row in rows] == [["bills", "1"], ["mail", "3"]]
    assert "pending table 1, log to row" in result.stderr


def test_json_has_version_and_rows(node: RunningNode) -> None:
    result = run_here("sql", BY_TOPIC, "--json", "--endpoint", node.endpoint)
    document = json.loads(result.stdout)
    assert document["version"]["table"] == 1
    assert [(row["topic"], row["waiting"]) for row in document["rows"]] == [("bills", 1), ("mail", 3)]
    assert document["rows"][0]["first"].endswith("Z")


def test_csv_has_all_rows(node: RunningNode, tmp_path: Path) -> None:
    query = tmp_path / "q.sql"
    query.write_text("select topic, body from pending order by seq -- all of them\n")
    result = run_here("sql", "--file", str(query), "--csv", "--endpoint", node.endpoint)
    assert list(csv.reader(io.StringIO(result.stdout))) == [
        ["topic", "body"], ["mail", "m0"], ["mail", "m1"], ["mail", "m2"], ["bills", "\\xff00"],
    ]  # fmt: skip
    piped = run_here("sql", "--file", "-", "--csv", "--endpoint", node.endpoint, text=query.read_text())
    assert piped.stdout == result.stdout


def test_a_long_answer_is_cut_with_a_note(node: RunningNode) -> None:
    result = run_here("sql", "from range(100)", "--limit-rows", "3", "--endpoint", node.endpoint)
    assert [line.strip() for line in result.stdout.splitlines()[2:]] == ["0", "1", "2"]
    assert "the first 3 rows" in result.stderr
    result = run_here("sql", "from range(3)", "--limit-rows", "3", "--endpoint", node.endpoint)
    assert "the first" not in result.stderr


def test_without_a_query_the_views_are_shown() -> None:
    result = run_here("sql")
    views = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    tables = ["pending", "pending_table", "ledger", "archive", "log", "schedules", "selections"]
    assert list(views) == [*tables, "scheduled"]
    assert "due_ms" in views["pending"] and ", due," in views["pending"]
    documents = json.loads(run_here("sql", "--json").stdout)["views"]
    assert {"seq", "state", "cause", "released"} <= set(documents["scheduled"])


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
    result = run_here("sql", *arguments, "--endpoint", node.endpoint)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr and "Traceback" not in result.stderr


def test_no_broker_is_told_with_its_address() -> None:
    result = run_here("sql", "select 1", "--endpoint", "grpc://127.0.0.1:1")
    assert result.returncode == ExitCode.UNREACHABLE
    assert "no broker answers at grpc://127.0.0.1:1" in result.stderr


def test_values_are_converted_for_json() -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = [
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
    assert [plain(value) for value in values] == [
        "text", "\\xff", "2030-01-02T03:04:05Z", "2030-01-02", 12, 1.5, ["a"], {"k": "b"}, None,
    ]  # fmt: skip


def test_lines_are_aligned_and_control_characters_become_dots() -> None:
    output = list(lines(["name", "n"], [["a\nb", 5], ["x" * 100, 1_000], [None, None]]))
    assert output[0].endswith("     n")
    assert output[2].startswith("a·b ") and output[2].endswith("     5")
    assert output[3].split()[0] == "x" * 59 + "…"
    assert output[4] == ""


HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def _pending(endpoint: str, *options: str) -> dict[str, Any]:
    """Run `timeball pending`, and return its document."""
    result = run_here("pending", "--json", *options, "--endpoint", endpoint)
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_pending_counts_tail_and_table_without_cancelled_messages(tmp_path: Path) -> None:
    """The count of pending messages is the same before and after a compaction."""
    with running_node(tmp_path / "d") as node, node.client() as ball:
        endpoint = node.endpoint
        assert _pending(endpoint)["waiting"] == 0
        now_ms = ball.status()["now_ms"]
        # All messages are due in the middle of an hour, so that none of these hours ends while the test runs.
        begin_ms = now_ms // DAY_MS * DAY_MS + 2 * DAY_MS + HOUR_MS // 2
        rows = [
            {"topic": "t", "body": b"x", "unique_key": f"m{i}", "due_ms": begin_ms + i % 4 * HOUR_MS}
            for i in range(100)
        ]
        ball.send_many(rows)
        ball.cancel(ids=["m0", "m4"])
        document = _pending(endpoint, "--by", "hour")
        assert (document["waiting"], document["tail_rows"], document["table_rows"]) == (98, 98, 0)
        assert list(document["due"].values()) == [23, 25, 25, 25]
        ball.compact()
        ball.cancel(ids=["m1"])
        ball.send_many([{"topic": "t", "body": b"y", "due_ms": begin_ms}])
        document = _pending(endpoint, "--by", "hour")
        assert (document["waiting"], document["tail_rows"]) == (98, 1)
        assert list(document["due"].values()) == [24, 24, 25, 25]
        result = run_here("pending", "--endpoint", endpoint)
        assert "98 waiting" in result.stdout and "█" in result.stdout


def test_a_scheduled_message_that_was_written_again_is_counted_once_wherever_it_lies(tmp_path: Path) -> None:
    """It is counted once with two rows, with three, and with its last row if retention has removed the other rows."""
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, node.client() as ball:
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(10)])
        places = write_again(node, 2, 3, 4)
        write_again(node, places[2])
        assert [v.verdict for v in node.run(node.broker.cancel(seqs=[3, 10]))] == ["cancelled"] * 2
        assert (count_waiting(node.endpoint).tail_rows, count_waiting(node.endpoint).table_rows) == (8, 0)
        fill_segment(node)
        write_again(node, 2, 4, 5, 6, 7, 8)
        assert apply_retention(node) > 10
        # A control: the eighth and the tenth message were not written again, so retention has removed them.
        counts = count_waiting(node.endpoint)
        assert (counts.tail_rows, sum(counts.hours.values())) == (6, 6)


def test_a_moved_row_is_ignored_once_the_table_has_the_message(tmp_path: Path) -> None:
    with running_node(tmp_path / "d") as node, node.client() as ball:
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(4)])
        write_again(node, 2, 3)
        ball.compact()
        assert (count_waiting(node.endpoint).tail_rows, count_waiting(node.endpoint).table_rows) == (0, 4)


def test_only_messages_due_after_the_time_of_the_broker_are_counted(tmp_path: Path) -> None:
    """This holds for the tail and for the table."""
    clock = ManualClock()
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, node.client() as ball:
        due = [clock.wall + delay_ms for delay_ms in (999, 1_000, 1_001)]
        ball.send_many([{"topic": "t", "body": b"x", "due_ms": due_ms} for due_ms in due])
        assert sum(count_waiting(node.endpoint).hours.values()) == 3
        ball.compact()
        assert count_waiting(node.endpoint).table_rows == 3
        clock.advance(1_000)
        counts = count_waiting(node.endpoint)
        assert (counts.table_rows, counts.now_ms) == (1, clock.wall)


@pytest.mark.parametrize(
    ("span_hours", "unit"),
    [(10, BarWidth.HOUR), (47 * 24, BarWidth.DAY), (400 * 24, BarWidth.MONTH), (10**5, BarWidth.YEAR)],
)
def test_auto_takes_the_finest_unit_that_fits(span_hours: int, unit: BarWidth) -> None:
    """AUTO gives at most BARS_MAX bars, as many as a screen has lines."""
    counts = PendingCounts(now_ms=0, hours=dict.fromkeys(range(1, span_hours), 1))
    chosen = counts.by(BarWidth.AUTO)
    assert chosen == counts.by(unit)
    assert len(chosen) <= BARS_MAX
    assert sum(chosen.values()) == span_hours - 1
