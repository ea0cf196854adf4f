"""The table of docs/figures.md, from one run on one machine: nothing of an earlier run stays in it.

    timeball bench append pop grpc http punctual burst memory restart keys compact pipeline --json > figures.jsonl
    python -m benchmarks.figures figures.jsonl

Benchmarks that the file lacks have no rows. The machine is this one, and the date that of the file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.designs_picture import DOCS, into_page
from benchmarks.report import brief
from benchmarks.versus.machine import describe

Found = Mapping[tuple[str, str], Mapping[str, Any]]  # benchmark, figure -> its value, unit, bar and ratio


@dataclass(frozen=True)
class Shown:
    """A row of the page: figures of one benchmark, side by side."""

    text: str
    benchmark: str
    figures: tuple[str, ...]


SENT = "`fdatasync` before every answer"
SHOWN = (
    Shown(f"sends over Flight in batches of 10,000, {SENT}", "append", ("10,000 rows, 8 in flight: rate",)),
    Shown("the same, one message a batch, 64 in flight", "append", ("1 row, 64 in flight: rate",)),
    Shown(
        "POP of 32 messages, each acknowledged by a request of its own, 8 consumers",
        "pop",
        ("pop 32 and ack each, 8x1: rate", "pop 32 and ack each, 8x1: server CPU"),
    ),
    Shown(
        f"gRPC, sends of one message a call, 8 connections x 8 in flight, {SENT}",
        "grpc",
        ("send 1 a call, 8x8: rate", "send 1 a call, 8x8: server CPU"),
    ),
    Shown("the same, 32 messages a call", "grpc", ("send 32 a call, 8x8: rate",)),
    Shown("gRPC, received 32 a call and acknowledged", "grpc", ("receive 32 and ack, 8x1: rate",)),
    Shown(
        f"HTTP, sends of one message a request, 64 connections, {SENT}",
        "http",
        ("send 1 a request, 64x1: rate", "send 1 a request, 64x1: server CPU"),
    ),
    Shown("the same, NDJSON of 100, 8 connections", "http", ("send NDJSON 100 a request, 8x1: rate",)),
    Shown("the same, Arrow of 10,000, 4 connections", "http", ("send Arrow 10,000 a request, 4x1: rate",)),
    Shown(
        "10,000 msg/s due at random milliseconds: lateness p99, p50, max",
        "punctual",
        ("lateness p99", "lateness p50", "lateness max"),
    ),
    Shown("the same, when the consumer has it: p99", "punctual", ("at the consumer p99",)),
    Shown(
        "1 M messages due in one second: all in their queues after",
        "burst",
        ("spread, in the tail: last release",),
    ),
    Shown("RAM for each pending message, after compaction", "memory", ("slope between them",)),
    Shown(
        "kill -9 with 1 M in the tail: first release on time after",
        "restart",
        ("process start to first on-time release",),
    ),
    Shown(
        "cancel by key, 8 clients: pending messages, rate and p99 (with bars)",
        "keys",
        ("scheduled messages in the table", "cancel by key, 8 at a time: rate", "cancel by key, 8 at a time: p99"),
    ),
    Shown("the same table: kill -9 to ready", "keys", ("kill -9 to ready",)),
    Shown("`compact` on Spark local[2]", "compact", ("spark: rate after the first attach",)),
    Shown("`bulk` on Spark local[2], 10 M messages from Parquet", "pipeline", ("bulk: rate",)),
    Shown("Spark reads the log, all columns", "pipeline", ("read log, all columns: rate",)),
    Shown("`ledger` on Spark local[2]", "pipeline", ("ledger: rate",)),
    Shown(
        "`dispatch` on Spark local[2], 10,000 msg/s: lateness p50",
        "pipeline",
        ("dispatch, steady: lateness p50",),
    ),
    Shown(
        "`dispatch`, 1 M due in one second: all in their queues after",
        "pipeline",
        ("dispatch, burst: last release after it began",),
    ),
)  # fmt: skip


def figures_of(documents: Iterable[Mapping[str, Any]]) -> Found:
    """Return the figures of a run. Raises ValueError for a small one, whose figures mean nothing."""
    found = {}
    for document in documents:
        if document["small"]:
            raise ValueError(f"{document['benchmark']} is of --size small: its figures mean nothing")
        for figure in document.get("figures", ()):
            found[document["benchmark"], figure["name"]] = figure
    return found


def markdown(found: Found, machine: Mapping[str, str], date: str) -> str:
    """Build what stands between the marks of the page: machine, date and table. A missed bar makes a figure bold."""
    described = "; ".join(f"{name}: {value}" for name, value in machine.items())
    lines = [f"Measured {date}. {described}.", "", "| figure | bar | measured |", "|---|---|---|"]
    for row in SHOWN:
        figures = [found[row.benchmark, name] for name in row.figures if (row.benchmark, name) in found]
        if figures:
            bars = [_value(figure, "bar") for figure in figures if figure["bar"]]
            lines.append(f"| {row.text} | {'; '.join(bars)} | {'; '.join(map(_measured, figures))} |")
    return "\n".join(lines) + "\n"


def _value(figure: Mapping[str, Any], name: str) -> str:
    return f"{brief(figure[name])} {figure['unit']}"


def _measured(figure: Mapping[str, Any]) -> str:
    text = _value(figure, "value")
    return f"**{text}**" if figure["ratio"] is not None and figure["ratio"] < 1 else text


def main(arguments: list[str]) -> None:
    """Bring the figures of a file into the page."""
    (name,) = arguments
    file, page = Path(name), DOCS / "figures.md"
    found = figures_of(json.loads(line) for line in file.read_text("utf-8").splitlines())
    date = time.strftime("%Y-%m-%d", time.gmtime(file.stat().st_mtime))
    page.write_text(into_page(page.read_text("utf-8"), markdown(found, describe(), date)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
