"""docs/pipeline/forecast.md is held to the code: it names every option, and its commands and examples run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.main
from pyspark.sql import SparkSession
from tests.cli.in_process import run_here
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode, running_node
from tests.pipeline.traffic import send

from timeball.cli import main
from timeball.limits import HOUR_MS
from timeball.pipeline.source.options import DEFAULT_ENDPOINT

PAGE = "docs/pipeline/forecast.md"


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("page") / "data", compact_self=False) as running:
        send(running.endpoint, 40, after_ms=2 * HOUR_MS)
        running.run(running.broker.compact())
        send(running.endpoint, 10, after_ms=HOUR_MS, topic="mail")
        yield running


def options() -> set[str]:
    command = typer.main.get_command(main.app).commands["forecast"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


def told_options(text: str) -> set[str]:
    return {name for name in first_cells(section(text, "The due load")) if re.match(r"--\w", name)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]


def test_every_option() -> None:
    assert told_options(page(PAGE)) == options() - {"--help"}
    assert told_options(page(PAGE).replace("`--within`", "`--without`")) != options() - {"--help"}


@pytest.mark.parametrize("command", [each for each in commands() if "--master" not in each])
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
    asked = ("--by-topic", "--consumer-rate", "5", "--within", "1m", "--extra-rows", "5", "--extra-at", "1h")
    document = json.loads(run_here("forecast", "--json", "--endpoint", busy.endpoint, *asked).stdout)
    told = set(re.findall(r"`(\w+)`", section(page(PAGE), "JSON") + section(page(PAGE), "What waited then")))
    named = {*document, *document["load"], *document["load"]["curve"][0]} - {"within_ms"}
    assert not named - told, named - told
    assert {"backlog_max", "lateness_p99_ms", "caught_up_ms"} <= set(document["what_if"]["queues"]["*"])


@pytest.mark.spark
def test_the_examples_run(spark: SparkSession, busy: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = blocks("python")
    for code in (first, second):
        exec(compile(code.replace(DEFAULT_ENDPOINT, busy.endpoint), PAGE, "exec"), {})
    peaks, late, days, reminders = capsys.readouterr().out.splitlines()
    assert peaks.startswith("[Peak(at_ms=") and "Bar(at_ms=" in days
    assert all(number.isdecimal() and int(number) > 0 for number in late.split())
    assert reminders.startswith("[Peak(at_ms=1896080400000, rows=17, minute_rows=1000)]")


def test_a_command_that_does_not_exist_is_noticed(busy: RunningNode) -> None:
    """The negative control of the commands."""
    assert run_here("forecast", "--endpoint", busy.endpoint, "--by", "week").returncode == 2
