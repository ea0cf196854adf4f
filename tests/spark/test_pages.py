"""The pages of docs/pipeline agree with the code: examples and commands run, options, views and columns exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
from pyspark.sql import SparkSession
from tests.cli.in_process import run_here
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import attached_seqs, send, send_due_now

from timeball.cli import main
from timeball.model.errors import RequestError
from timeball.model.limits import HOUR_MS
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive
from timeball.spark.jobs.bulk import REJECT_SCHEMA
from timeball.spark.jobs.campaign import STATES
from timeball.spark.log_events import ARCHIVE_SCHEMA
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.options import (
    APPLIES_TO_READS,
    BATCH_ONLY,
    DEFAULT_ENDPOINT,
    SCHEMAS,
    STREAM_ONLY,
    STREAMED,
    ReadOptions,
    WriteOptions,
    describe,
)
from timeball.spark.table_store import sibling
from timeball.spark.views import spark_views, view_sql
from timeball.spark.views.duckdb_session import SqlSession, view_columns

ARCHIVE, BULK, FORECAST, SOURCE, SQL = (
    f"docs/pipeline/{name}.md" for name in ("archive", "bulk", "forecast", "data-source", "sql")
)
# Said in words, or the same in every command.
IN_WORDS = {
    "--dry-run",
    "--yes",
    "--master",
    "--conf",
    "--packages",
    "--name",
    "--endpoint",
    "--json",
    "--help",
}


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)


def run_examples(name: str, endpoint: str, **instead: str) -> int:
    """Run the Python blocks of a page, one after the other. Returns their number."""
    names: dict[str, object] = {}
    examples = blocks(name, "python")
    for code in examples:
        for text, ours in {DEFAULT_ENDPOINT: endpoint, **instead}.items():
            code = code.replace(text, ours)
        exec(compile(code, name, "exec"), names)
    return len(examples)


# ---- commands and their options -----------------------------------------------------------------------------


def options_of(*names: str) -> set[str]:
    command: Any = typer.main.get_command(main.app)
    for name in names:
        command = command.get_command(None, name)
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def command_lines(name: str) -> list[list[str]]:
    lines = "".join(blocks(name, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def unknown_options(words: list[str]) -> set[str]:
    names = words[1:3] if words[1] in ("campaign", "pipeline") else words[1:2]
    known = options_of(*[name for name in names if not name.startswith("-")])
    return {word for word in words if word.startswith("--")} - known


@pytest.mark.parametrize(("name", "count"), [(ARCHIVE, 5), (BULK, 9)])
def test_the_commands_that_are_shown_have_these_options(name: str, count: int) -> None:
    lines = command_lines(name)
    assert len(lines) == count and all(words[0] == "timeball" for words in lines)
    assert not [words for words in lines if unknown_options(words)]
    assert unknown_options(["timeball", "replay", "--form", "x"]) == {"--form"}, "the control"


@pytest.mark.parametrize(
    ("name", "heading", "command"),
    [
        (ARCHIVE, "Replaying a window", "replay"),
        (BULK, "Scheduling files", "bulk"),
        (FORECAST, "The due load", "forecast"),
    ],
)
def test_every_option_is_told(name: str, heading: str, command: str) -> None:
    reported = {word for word in first_cells(section(page(name), heading)) if re.match(r"--\w", word)}
    assert reported - IN_WORDS == options_of(command) - IN_WORDS


def test_every_command_event_and_column_is_told() -> None:
    reported = first_cells(section(page(BULK), "Campaigns")) - {"", "command", "---"}
    commands: Any = typer.main.get_command(main.app)
    assert reported == set(commands.get_command(None, "campaign").list_commands(None))
    assert all(f"`{state}`" in page(BULK) for state in STATES)
    assert all(f"`{name}`" in page(BULK) for name in REJECT_SCHEMA.names)
    reported = first_cells(section(page(ARCHIVE), "The archive job").partition("### ")[0])
    assert reported - {"column", "---", ""} <= set(ARCHIVE_SCHEMA.names)
    assert {"body", "topic", "day"} <= reported


# ---- the data source ----------------------------------------------------------------------------------------


def rows_of(text: str) -> list[list[str]]:
    """Read the cells of a section's table, without its head."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def fits(name: str) -> str:
    """Format the reads to which an option applies, as the page does."""
    when = "; stream" if name in STREAM_ONLY else "; batch" if name in BATCH_ONLY else ""
    return ", ".join(APPLIES_TO_READS.get(name, ("all",))) + when


def test_every_option_of_a_read() -> None:
    reported = rows_of(section(page(SOURCE), "Options of a read"))
    assert reported == [[f"`{n}`", fits(n), describe()[n]] for n in ReadOptions.__struct_fields__]


def test_every_option_of_a_write() -> None:
    reported = rows_of(section(page(SOURCE), "Options of a write"))
    assert reported == [[f"`{name}`", describe()[name]] for name in WriteOptions.__struct_fields__]


def test_everything_that_can_be_read() -> None:
    reported = rows_of(section(page(SOURCE), "Reading").partition("### ")[0])
    expected = [[f"`{read}`", "yes", "yes" if read in STREAMED else "no"] for read in SCHEMAS]
    assert [row[:3] for row in reported[1:]] == expected  # its head begins with `read`


def test_a_wrong_row_is_noticed() -> None:
    """The negative control: another meaning, and an option left out."""
    text = section(page(SOURCE), "Options of a write")
    assert rows_of(text) != rows_of(text.replace("grpc://host:port", "a broker"))
    assert rows_of(text) != rows_of(text.replace("| `job_id`", "`job_id`"))


# ---- views and questions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with ten messages in the pending table and two that are due at once."""
    with running_node(tmp_path_factory.mktemp("page") / "data", compact_rows=0) as node:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        send_due_now(node.endpoint, 2)
        yield node


def test_every_view_and_every_instant() -> None:
    reported = first_cells(section(page(SQL), "Views"))
    assert set(view_sql.VIEWS) == reported & set(view_sql.VIEWS)
    columns = view_columns()
    assert list(columns) == list(view_sql.VIEWS)
    twins = re.findall(r"`(\w+_ms)` and\s`(\w+)`", page(SQL))
    assert dict(twins) == view_sql._TIMESTAMP_TWINS
    existing = {name for names in columns.values() for name in names}
    assert all({low, high} <= existing for low, high in twins)


def test_the_questions_are_answered(story: RunningNode) -> None:
    questions = blocks(SQL, "sql") + re.findall(
        r'^timeball sql [^"\n]*"(select .*?)"', blocks(SQL, "sh")[0], re.MULTILINE
    )
    assert len(questions) == 8
    with SqlSession(story.endpoint) as session:
        for text in questions:
            rows = session.run(text).rows.read_all()
            assert rows.num_rows or "having" in text, text
        with pytest.raises(RequestError):  # the control: a question with a slip is noticed
            session.run(questions[0].replace("due", "dew"))


# ---- the forecast -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with 40 messages in the pending table and ten of the topic `mail` in the tail."""
    with running_node(tmp_path_factory.mktemp("page") / "data", compact_rows=0) as running:
        send(running.endpoint, 40, after_ms=2 * HOUR_MS)
        running.run(running.broker.compact())
        send(running.endpoint, 10, after_ms=HOUR_MS, topic="mail")
        yield running


def shown_forecasts() -> list[str]:
    lines = [
        line.partition("#")[0].strip() for block in blocks(FORECAST, "sh") for line in block.splitlines()
    ]
    return [line for line in lines if "--master" not in line]


@pytest.mark.parametrize("command", shown_forecasts())
def test_the_commands_run(
    busy: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    if "--picture" in command:
        pytest.importorskip("matplotlib", reason="the extra `picture` is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "campaign.csv").write_text("due\n2035-01-31T09:00:00Z\n")
    at = pa.array([2_000_000_000_000], pa.timestamp("ms", "UTC"))
    pq.write_table(pa.table({"send_at": at}), tmp_path / "people.parquet")
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("timeball", "forecast")
    ended = run_here("forecast", "--endpoint", busy.endpoint, *arguments)
    if "--timestamp" in command and ended.returncode == 2:
        assert "no version so old" in ended.stderr  # this table is younger
        return
    assert ended.returncode == 0, ended.stderr
    assert " due from " in ended.stdout
    for drawn in re.findall(r"--picture (\S+)", command):
        assert (tmp_path / drawn).stat().st_size > 1_000


def test_the_fields_of_the_document(busy: RunningNode) -> None:
    requested = (
        "--by-topic",
        "--consumer-rate",
        "5",
        "--within",
        "1m",
        "--extra-rows",
        "5",
        "--extra-at",
        "1h",
    )
    document = json.loads(run_here("forecast", "--json", "--endpoint", busy.endpoint, *requested).stdout)
    reported = set(
        re.findall(
            r"`(\w+)`", section(page(FORECAST), "JSON") + section(page(FORECAST), "An earlier forecast")
        )
    )
    named = {*document, *document["load"], *document["load"]["curve"][0]} - {"within_ms"}
    assert not named - reported, named - reported
    assert {"backlog_max", "lateness_p99_ms", "caught_up_ms"} <= set(document["what_if"]["queues"]["*"])


def test_a_command_that_does_not_exist_is_noticed(busy: RunningNode) -> None:
    """The negative control of the commands."""
    assert run_here("forecast", "--endpoint", busy.endpoint, "--by", "week").returncode == 2


# ---- the examples in Python ---------------------------------------------------------------------------------


@pytest.mark.spark
def test_the_first_block_of_the_pipeline_runs(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    """As it stands, with nothing before it."""
    code = next(block for block in blocks("docs/pipeline.md", "python") if 'format("timeball")' in block)
    assert "session.register(spark)" in code
    exec(compile(code.replace(DEFAULT_ENDPOINT, node.endpoint), "docs/pipeline.md", "exec"), {})
    assert len(attached_seqs(broker)) == 1


@pytest.mark.spark
def test_the_examples_of_the_archive_run(
    spark: SparkSession, node: RunningNode, broker: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    send_due_now(node.endpoint, 10)
    uri = sibling(broker.status().table.uri, "archive")
    archive.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    with node.client() as ball:
        now_ms = ball.status()["now_ms"]
        eventually(lambda: ball.status()["now_ms"] > now_ms + 1, "the window is over")
    assert run_examples(ARCHIVE, node.endpoint, **{"/shared/timeball/archive": uri}) == 3
    shown = capsys.readouterr().out
    assert re.search(r"\| *10\| *\d+\|", shown)
    assert shown.splitlines()[-2:] == ["10", "10 False"]
    assert Path(uri).is_dir()


@pytest.mark.spark
def test_the_examples_of_bulk_run(
    spark: SparkSession, node: RunningNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_examples(BULK, node.endpoint) == 2
    assert capsys.readouterr().out.splitlines() == ["1000 0", "1000 1000 1000 1000"]


@pytest.mark.spark
def test_the_examples_of_the_data_source_run(
    spark: SparkSession,
    node: RunningNode,
    broker: Endpoint,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    send(node.endpoint, 30)
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 10)
    before = len(attached_seqs(broker))
    assert run_examples(SOURCE, node.endpoint, **{'"/shared': f'"{tmp_path}'}) == 4
    assert spark.read.parquet(str(tmp_path / "orders")).count() == 10
    assert len(attached_seqs(broker)) == before + 1
    assert re.search(r"\| *orders\| *30\|", capsys.readouterr().out)


@pytest.mark.spark
def test_the_examples_of_the_forecast_run(
    spark: SparkSession, busy: RunningNode, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_examples(FORECAST, busy.endpoint) == 2
    peaks, late, days, reminders = capsys.readouterr().out.splitlines()
    assert peaks.startswith("[Peak(at_ms=") and "Bar(at_ms=" in days
    assert all(number.isdecimal() and int(number) > 0 for number in late.split())
    assert reminders.startswith("[Peak(at_ms=1896080400000, rows=17, minute_rows=1000)]")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_examples_of_the_views_run_and_spark_takes_the_same_questions(
    spark: SparkSession, story: RunningNode, capsys: pytest.CaptureFixture[str]
) -> None:
    run_examples(SQL, story.endpoint)
    assert capsys.readouterr().out.splitlines()[-2:] == ["1", "10 1"]
    assert spark_views.register(spark, story.endpoint).table == 1
    for text in blocks(SQL, "sql"):
        assert spark.sql(text).columns, text  # resolved: names, functions and types; not run
