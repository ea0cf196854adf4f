"""docs/pipeline/sql.md is held to the code: its views are the views, its questions are answered, its examples run."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession
from tests.docs_pages import first_cells, page, section
from tests.node_fixture import RunningNode, running_node
from tests.pipeline.traffic import send, send_due_now

from timeball.errors import RequestError
from timeball.pipeline.source.options import DEFAULT_ENDPOINT
from timeball.pipeline.views import spark_views, view_sql
from timeball.pipeline.views.duckdb_session import SqlSession, view_columns

PAGE = "docs/pipeline/sql.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(PAGE), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("page") / "data", compact_self=False) as node:
        send(node.endpoint, 10)
        node.run(node.broker.compact())
        send_due_now(node.endpoint, 2)
        yield node


def test_every_view_and_every_instant() -> None:
    told = first_cells(section(page(PAGE), "Views"))
    assert set(view_sql.VIEWS) == told & set(view_sql.VIEWS)
    columns = view_columns()
    assert list(columns) == list(view_sql.VIEWS)
    twins = re.findall(r"`(\w+_ms)` and `(\w+)`", page(PAGE))
    there = {name for names in columns.values() for name in names}
    assert len(twins) == 7 and all({low, high} <= there for low, high in twins)


def test_the_questions_are_answered(story: RunningNode) -> None:
    questions = blocks("sql") + re.findall(
        r'^timeball sql [^"\n]*"(select .*?)"', blocks("sh")[0], re.MULTILINE
    )
    assert len(questions) == 10
    with SqlSession(story.endpoint) as session:
        for text in questions:
            rows = session.run(text).rows.read_all()
            assert rows.num_rows or "having" in text, text
        with pytest.raises(RequestError):  # the control: a question with a slip is noticed
            session.run(questions[0].replace("due", "dew"))


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_examples_run_and_spark_takes_the_same_questions(spark: SparkSession, story: RunningNode) -> None:
    printed = io.StringIO()
    for code in blocks("python"):
        with contextlib.redirect_stdout(printed):
            exec(compile(code.replace(DEFAULT_ENDPOINT, story.endpoint), PAGE, "exec"), {})
    assert printed.getvalue().splitlines()[-2:] == ["1", "10"]
    assert spark_views.register(spark, story.endpoint).table == 1
    for text in blocks("sql"):
        assert spark.sql(text).columns, text  # resolved: names, functions and types; not run
