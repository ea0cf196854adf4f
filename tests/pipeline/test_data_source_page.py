"""docs/pipeline/data-source.md is held to the code: its tables say what the options say, its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.docs_pages import page, section
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import attached_seqs, send, send_due_now

from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.options import (
    DEFAULT_ENDPOINT,
    FITS,
    ONLY_BATCH,
    ONLY_STREAM,
    READS,
    STREAMED,
    ReadOptions,
    WriteOptions,
    describe,
)

PAGE = "docs/pipeline/data-source.md"


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows of a section's table, without its head."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def fits(name: str) -> str:
    """For what an option of a read is, as the page has it."""
    when = "; stream" if name in ONLY_STREAM else "; batch" if name in ONLY_BATCH else ""
    return ", ".join(FITS.get(name, ("all",))) + when


def test_every_option_of_a_read() -> None:
    told = rows_of(section(page(PAGE), "Options of a read"))
    assert told == [[f"`{n}`", fits(n), describe()[n]] for n in ReadOptions.__struct_fields__]


def test_every_option_of_a_write() -> None:
    told = rows_of(section(page(PAGE), "Options of a write"))
    assert told == [[f"`{name}`", describe()[name]] for name in WriteOptions.__struct_fields__]


def test_everything_that_can_be_read() -> None:
    told = rows_of(section(page(PAGE), "Reading").partition("### ")[0])
    wanted = [[f"`{read}`", "yes", "yes" if read in STREAMED else "no"] for read in READS]
    assert [row[:3] for row in told[1:]] == wanted  # its head begins with `read`


def test_a_wrong_row_is_noticed() -> None:
    """The negative control: another meaning, and an option left out."""
    text = section(page(PAGE), "Options of a write")
    assert rows_of(text) != rows_of(text.replace("grpc://host:port", "a broker"))
    assert rows_of(text) != rows_of(text.replace("| `job_id`", "`job_id`"))


@pytest.mark.spark
def test_the_block_in_the_readme_runs(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    """As it stands, with nothing before it."""
    blocks = re.findall(r"^```python\n(.*?)^```", page("README.md"), re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if 'format("timeball")' in block]
    assert "session.register(spark)" in code
    exec(compile(code.replace(DEFAULT_ENDPOINT, node.endpoint), "README.md", "exec"), {})
    assert len(attached_seqs(broker)) == 1


@pytest.mark.spark
def test_the_examples_run(
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
    names: dict[str, object] = {}
    examples = re.findall(r"^```python\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)
    for code in examples:
        code = code.replace(DEFAULT_ENDPOINT, node.endpoint).replace('"/shared', f'"{tmp_path}')
        exec(compile(code, PAGE, "exec"), names)
    assert len(examples) == 4
    assert spark.read.parquet(str(tmp_path / "orders")).count() == 10
    assert len(attached_seqs(broker)) == before + 1
    assert re.search(r"\| *orders\| *30\|", capsys.readouterr().out)
