"""`timeball forecast` from end to end: as text, as JSON, as a picture, and on Spark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.cli.unreachable import NO_FLIGHT, assert_says_how_to_reach_one
from tests.node_fixture import RunningNode, running_node
from tests.spark.traffic import send


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """300 orders an hour apart, in the table, and 20 mails in the tail."""
    with running_node(tmp_path_factory.mktemp("forecast") / "data", compact_rows=0) as running:
        send(running.endpoint, 300)
        running.run(running.broker.compact())
        send(running.endpoint, 20, topic="mail")
        yield running


def test_a_forecast_for_people(node: RunningNode) -> None:
    result = run_here("forecast", "--endpoint", node.endpoint, "--by-topic", "--consumer-rate", "5")
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert "320 due from" in result.stdout and "█" in result.stdout
    assert "  orders  300 rows" in result.stdout and "  mail    20 rows" in result.stdout
    assert "consumers at 5 a second, as it is:" in result.stdout


def test_a_forecast_for_programs(node: RunningNode, tmp_path: Path) -> None:
    (tmp_path / "campaign.csv").write_text("due\n2035-01-01T00:00:00Z\n")
    options = ["--json", "--topic", "orders", "--by", "day", "--extra", str(tmp_path / "campaign.csv")]
    result = run_here("forecast", "--endpoint", node.endpoint, *options, "--within", "10s")
    assert result.returncode == 0, result.stderr
    [document] = [json.loads(line) for line in result.stdout.splitlines()]
    assert (document["waiting"], document["extra"], document["version"]) == (300, 1, 1)
    assert sum(bar["rows"] for bar in document["load"]["curve"]) == 301
    assert document["load"]["by"] == "day" and document["load"]["peaks"][0]["rows"] == 1
    assert document["within_ms"] == 10_000 and document["rate_needed"] > 0


def test_a_forecast_is_drawn_as_a_picture(node: RunningNode, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `picture` is not installed")
    file = tmp_path / "load.png"
    drawn = run_here("forecast", "--endpoint", node.endpoint, "--picture", str(file))
    assert drawn.returncode == 0 and str(file) in drawn.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--consumer-rate", "0"], "--consumer-rate '0'"),
        (["--extra-at", "2h"], "--extra-rows and --extra-at"),
        (["--until", "2020-01-01T00:00:00Z"], "--until lies before now"),
        (["--version", "1", "--timestamp", "5"], "--version and --timestamp"),
        (["--check"], "--check compares an older forecast with the messages released since"),
        (["--backlog", "5"], "--backlog has no effect without"),
        (["--version", "99"], "no version 99 of the pending table"),
        (["--picture", "x.txt"], "--picture x.txt"),
        (["--extra", "nowhere.txt"], "nowhere.txt: a file of Parquet or CSV"),
    ],
)
def test_a_refusal_names_the_option(node: RunningNode, options: list[str], sentence: str) -> None:
    result = run_here("forecast", "--endpoint", node.endpoint, *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert sentence in result.stderr and len(result.stderr.splitlines()) == 1


def test_an_option_that_cannot_be_read_is_named(node: RunningNode) -> None:
    for option in ("--from", "--until", "--extra-at"):
        result = run_here("forecast", "--endpoint", node.endpoint, option, "soon")
        assert result.returncode == 2 and option in result.stderr


def test_without_a_broker_a_forecast_gives_advice() -> None:
    assert_says_how_to_reach_one(run_here("forecast", "--endpoint", NO_FLIGHT), NO_FLIGHT)
    assert_says_how_to_reach_one(
        run_here("forecast", "--endpoint", NO_FLIGHT, "--master", "spark://127.0.0.1:1"),
        NO_FLIGHT,
    )


def test_conf_without_master_is_refused() -> None:
    result = run_here("forecast", "--endpoint", NO_FLIGHT, "--conf", "spark.ui.enabled=true")
    assert result.returncode == 2 and "have no effect without --master" in result.stderr


def test_an_import_of_the_command_does_not_import_its_libraries() -> None:
    code = (
        "import sys, timeball.cli.forecast;"
        "print([m for m in ('timeball.spark', 'deltalake', 'pyspark', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_counts_the_same_as_duckdb(node: RunningNode) -> None:
    pytest.importorskip("pyspark", reason="the extra `spark` is not installed")
    options = ["--json", "--by-topic", "--by", "hour", "--endpoint", node.endpoint]
    with_duckdb = json.loads(run_here("forecast", *options).stdout)
    on_spark = run_here("forecast", *options, "--master", "local[2]")
    assert on_spark.returncode == 0, on_spark.stderr
    assert json.loads(on_spark.stdout)["load"] == with_duckdb["load"]
