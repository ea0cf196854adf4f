"""docs/pipeline/bulk.md is held to the code: its examples run, its commands and options are there."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main
from pyspark.sql import SparkSession
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode

from timeball.cli import main
from timeball.pipeline.jobs.bulk import REJECT_SCHEMA
from timeball.pipeline.jobs.campaigns import EVENTS
from timeball.pipeline.source.options import DEFAULT_ENDPOINT

PAGE = "docs/pipeline/bulk.md"
SHOWN_IN_WORDS = {"--dry-run", "--master", "--endpoint", "--json", "--help"}


def options_of(*names: str) -> set[str]:
    command = typer.main.get_command(main.app)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts if option.startswith("--")}


def command_lines() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def unknown_options(words: list[str]) -> set[str]:
    names = words[1:3] if words[1] == "campaign" else words[1:2]
    return {word for word in words if word.startswith("--")} - options_of(*names)


def test_the_commands_that_are_shown_have_these_options() -> None:
    lines = command_lines()
    assert len(lines) == 9 and all(words[0] == "timeball" for words in lines)
    assert not [words for words in lines if unknown_options(words)]
    assert unknown_options(["timeball", "campaign", "resume", "--sift"]) == {"--sift"}, "the control"


def test_every_option_and_command_is_told() -> None:
    told = {word for word in first_cells(section(page(PAGE), "Scheduling files")) if re.match(r"--\w", word)}
    assert told == options_of("bulk") - SHOWN_IN_WORDS
    told = first_cells(section(page(PAGE), "Campaigns")) - {"", "command", "---"}
    assert told == set(typer.main.get_command(main.app).commands["campaign"].commands)  # type: ignore[attr-defined]


def test_every_event_and_column_is_told() -> None:
    text = page(PAGE)
    assert f"({', '.join(EVENTS)})" in text
    assert all(f"`{name}`" in text for name in REJECT_SCHEMA.names)


@pytest.mark.spark
def test_the_examples_run(spark: SparkSession, node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)
    for code in examples:
        exec(compile(code.replace(DEFAULT_ENDPOINT, node.endpoint), PAGE, "exec"), names)
    assert len(examples) == 2
    assert capsys.readouterr().out.splitlines() == ["1000 0", "1000 1000 1000 1000"]
