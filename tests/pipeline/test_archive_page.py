"""docs/pipeline/archive.md is held to the code: its examples run, its commands and options are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from pyspark.sql import SparkSession
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode, eventually
from tests.pipeline.traffic import send_due_now

from timeball import Timeball
from timeball.cli import main
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import archive
from timeball.pipeline.jobs.archive_writer import TABLE_SCHEMA
from timeball.pipeline.source.options import DEFAULT_ENDPOINT

PAGE = "docs/pipeline/archive.md"
OWN = {
    "--dry-run",
    "--yes",
    "--master",
    "--endpoint",
    "--json",
    "--help",
}  # said in words, or the same everywhere


def options_of(*names: str) -> set[str]:
    command = typer.main.get_command(main.app)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def command_lines(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def unknown_options(words: list[str]) -> set[str]:
    names = [word for word in words[1:3] if not word.startswith("-")]
    return {word for word in words if word.startswith("--")} - options_of(*names)


def test_the_commands_that_are_shown_have_these_options() -> None:
    lines = command_lines(page(PAGE))
    assert len(lines) == 6 and all(words[0] == "timeball" for words in lines)
    assert not [words for words in lines if unknown_options(words)]
    assert unknown_options(["timeball", "replay", "--form", "x"]) == {"--form"}, "the control"


def test_every_option_of_a_replay_is_told() -> None:
    cells = first_cells(section(page(PAGE), "Replaying a window"))
    told = {word for word in cells if re.match(r"--\w", word)}
    assert told == options_of("replay") - OWN


def test_every_column_that_is_told_is_there() -> None:
    told = first_cells(section(page(PAGE), "Keeping what passes").partition("### ")[0])
    assert told - {"column", "---", ""} <= set(TABLE_SCHEMA.names)
    assert {"body", "topic", "day"} <= told


@pytest.mark.spark
def test_the_examples_run(
    spark: SparkSession, node: RunningNode, broker: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    send_due_now(node.endpoint, 10)
    uri = archive.archive_uri(broker.status().table.uri)
    archive.extend(spark, node.endpoint, uri, broker.status().log.durable_seq)
    with Timeball(node.endpoint) as ball:
        now_ms = ball.status()["now_ms"]
        eventually(lambda: ball.status()["now_ms"] > now_ms + 1, "the window is over")
    names: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)
    for code in examples:
        code = code.replace(DEFAULT_ENDPOINT, node.endpoint).replace("/shared/timeball/archive", uri)
        exec(compile(code, PAGE, "exec"), names)
    assert len(examples) == 3
    shown = capsys.readouterr().out
    assert re.search(r"\| *10\| *\d+\|", shown)
    assert shown.splitlines()[-2:] == ["10", "10 False"]
    assert Path(uri).is_dir()
