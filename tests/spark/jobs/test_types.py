"""The table of Spark's types in docs/pipeline/bulk.md: each example is converted as its row says."""

from __future__ import annotations

import datetime as dt
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.model.errors import InvalidMessage
from timeball.spark.jobs.bulk import Columns, screen

PAGE = Path(__file__).parents[3] / "docs/pipeline/bulk.md"
NOW_MS = 1_800_000_000_000
ZONE = "Europe/Paris"
REFUSED, REJECTED, NULL, NEEDS_ZONE = "refused", "rejected", "null", " with `--zone`"
# A column of the page, and the column of a scheduled message that stands for it.
ROLES = {
    "due time": "due",
    "topic, tag, id": "tag",
    "keys": "keys",
    "body": "body",
    "properties": "properties",
}
CASTS_TO_STRING = {"varchar", "char"}  # only the schema of a table has these types
Cell = tuple[str, str]  # example, role


def table() -> dict[str, dict[str, str]]:
    """Return the rows of the page: example -> column -> cell."""
    lines = PAGE.read_text().partition("## Types of columns\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    header, _, *rows = cells
    assert header == ["type", "example", *ROLES]
    return {row[1].strip("`"): dict(zip(header, row, strict=True)) for row in rows}


def columns_of(role: str, zone: str | None) -> Columns:
    columns: dict[str, Any] = {"topic_name": "t", "due": "at", "body": "text", "zone": zone, role: "example"}
    return Columns(**columns)


def converted(spark: SparkSession, cells: list[Cell], zone: str | None) -> dict[Cell, str]:
    """Convert each example in each role, in one query. Returns the texts that the page's cells should have."""
    results: dict[Cell, str] = {}
    parts: list[DataFrame] = []
    for example, role in cells:
        frame = spark.sql(f"select {example} as example, {NOW_MS}L as at, 'text' as text")
        try:
            screened = screen(frame, columns_of(role, zone), NOW_MS)
        except InvalidMessage:
            results[example, role] = REFUSED
            continue
        value = f.col("due_ms" if role == "due" else role).cast("string")
        parts.append(
            screened.select(
                f.lit(example).alias("example"), f.lit(role).alias("role"), value.alias("value"), "reason"
            )
        )
    for row in reduce(DataFrame.unionAll, parts).collect():
        text = NULL if row["value"] is None else row["value"]
        if row["role"] == "due" and row["value"] is not None:
            text = dt.datetime.fromtimestamp(int(text) / 1_000, dt.UTC).isoformat(timespec="milliseconds")
        results[row["example"], row["role"]] = REJECTED if row["reason"] else f"`{readable(text)}`"
    return results


def readable(text: str) -> str:
    """Show the two separators of properties as the page does."""
    return text.replace("+00:00", "Z").replace("\x01", "^A").replace("\x02", "^B")


@pytest.mark.spark
def test_each_type_is_converted_as_the_page_says(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        cells = [(example, role) for example in table() for role in ROLES.values()]
        results = converted(spark, cells, None)
        due = [(example, "due") for example in table()]
        with_zone = converted(spark, due, ZONE)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    for cell, text in with_zone.items():
        if text != results[cell]:
            results[cell] = text + NEEDS_ZONE
    expected = {
        (example, role): row[name] for example, row in table().items() for name, role in ROLES.items()
    }
    assert {cell: text for cell, text in results.items() if text != expected[cell]} == {}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "body"),
    [
        ("{}as place, 1 as other", None),
        ("struct({}as point) as place", "place"),
        ("array({}) as place", "place"),
    ],
)
def test_a_body_of_json_has_no_geometry(spark: SparkSession, columns: str, body: str | None) -> None:
    point = "st_geomfromwkb(X'0101000000000000000000F03F0000000000000040') "
    frame = spark.sql(f"select {columns.format(point)}, {NOW_MS}L as at")
    with pytest.raises(InvalidMessage, match=r"column place: .*geometry\(.*drop it"):
        screen(frame, Columns(topic_name="t", due="at", body=body), NOW_MS)


@pytest.mark.spark
def test_the_page_has_every_type_of_spark(spark: SparkSession) -> None:
    from pyspark.sql import types

    named = {
        spark.sql(f"select {example} as c").schema["c"].dataType.typeName().split("(")[0]
        for example in table()
    }
    atomic = {
        kind.typeName().split("(")[0]
        for kind in vars(types).values()
        if isinstance(kind, type) and issubclass(kind, types.AtomicType) and not kind.__subclasses__()
    }
    assert atomic - named == CASTS_TO_STRING
