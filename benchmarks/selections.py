"""Bulk operations on many pending messages: acceptance, the next look-up, undo, and lateness of a stream beside them.

One million messages are due in an hour. Beside each operation a stream of 50 messages a second goes on, each due after
0.2 to 1 s. Lateness is store_ms - due_ms of its releases. The operations differ in their work afterwards: a shift by
hours writes nothing, a release writes two rows for each message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import messages, now_ms, quantiles, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball
from timeball.model.http_api import Selection
from timeball.model.message import Kind

ACCEPT_BAR_S, UNDO_BAR_S, LATENESS_BAR_MS = 1.0, 1.0, 20.0
BULK, STREAM, ELSEWHERE = "bulk", "stream", "elsewhere"
STREAM_PER_S, STREAM_S, BATCH_ROWS = 50, 10.0, 50_000


def run(small: bool = False) -> Report:
    """Measure; times in seconds, lateness in milliseconds."""
    report = Report("selections", small)
    count = 10_000 if small else 1_000_000
    with serving() as (_, ball):
        for topic in (BULK, STREAM, ELSEWHERE):
            ball.create_topic(topic, 4)
        ids = _fill(ball, count)
        here: dict[str, Any] = {"topics": [BULK]}
        # An undo follows each, so every operation covers all messages.
        operations: dict[str, Callable[[], Selection]] = {
            "shift 2 h": lambda: ball.selections.shift("2h", **here),
            "shift -30 min": lambda: ball.selections.shift("-30m", **here),
            "pause": lambda: ball.selections.pause(**here),
            "move": lambda: ball.selections.move(ELSEWHERE, **here),
            "cancel": lambda: ball.selections.cancel(**here),
        }
        for name, operate in operations.items():
            with _stream(ball, report, name):
                selection = _measure(
                    report, f"{name}: accepted and visible", ACCEPT_BAR_S, ball, ids, operate
                )
                time.sleep(STREAM_S / 2)
                undo = lambda id=selection.id: ball.selections.undo(id)  # noqa: E731
                _measure(report, f"{name}: undone and visible", UNDO_BAR_S, ball, ids, undo)
        with _stream(ball, report, "release"):
            begin_s, begin_seq = time.monotonic(), ball.status()["log"]["next_seq"]
            _measure(
                report, "release: accepted and visible", ACCEPT_BAR_S, ball, ids,
                lambda: ball.selections.release(**here),
            )  # fmt: skip
            wait_until(
                lambda: ball.status()["log"]["durable_seq"] >= begin_seq + 2 * count, 600, "the last release"
            )
            report.add("release: all released", time.monotonic() - begin_s, "s")
    return report


def _fill(ball: Timeball, count: int) -> list[str]:
    due_ms, ids = now_ms() + 3_600_000, []
    for begin in range(0, count, BATCH_ROWS):
        rows = min(BATCH_ROWS, count - begin)
        batch = messages(rows, np.full(rows, due_ms) + np.arange(begin, begin + rows) % 60_000, seed=begin)
        batch = batch.set_column(batch.schema.get_field_index("topic"), "topic", pa.array([BULK] * rows))
        ball.send_many(batch)
        ids.append(batch.column("unique_key")[0].as_py())
    return ids


def _measure(
    report: Report, name: str, bar_s: float, ball: Timeball, ids: list[str], operate: Callable[[], Selection]
) -> Selection:
    before = ball.get(ids[-1])
    begin_s = time.monotonic()
    selection = operate()
    after = ball.get(ids[-1])
    report.add(name, time.monotonic() - begin_s, "s", bar_s, "lower")
    assert before != after, "the look-up sees the operation"
    return selection


@contextmanager
def _stream(ball: Timeball, report: Report, name: str) -> Iterator[None]:
    """Send a stream during the block, and report its lateness."""
    ends, begin_seq = threading.Event(), ball.status()["log"]["next_seq"]
    rng = np.random.default_rng(7)

    def send() -> None:
        while not ends.wait(1 / STREAM_PER_S):
            ball.send(STREAM, "x", at=now_ms() + int(rng.integers(200, 1_000)))

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(STREAM_S / 2)
    try:
        yield
        time.sleep(STREAM_S / 2)
    finally:
        ends.set()
        sender.join()
    late = list[int]()
    for rows in ball.read_log(begin_seq, ball.status()["log"]["durable_seq"], kinds=[Kind.RELEASE]):
        lateness = np.asarray(rows.column("store_ms")) - np.asarray(rows.column("due_ms"))
        is_stream = np.array(rows.column("topic").to_pylist()) == STREAM
        late += lateness[is_stream].tolist()
    p50, p99, worst = quantiles(np.array(late))
    report.add(f"{name}: lateness beside it, p50", p50, "ms")
    report.add(f"{name}: lateness beside it, p99", p99, "ms", LATENESS_BAR_MS, "lower")
    report.add(f"{name}: lateness beside it, max", worst, "ms")
