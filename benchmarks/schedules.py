"""Recurring schedules: memory, start, many at one second, and lateness beside a steady load.

The folders with a million schedules are written by a node in this process, without HTTP. Then the real server starts
on each. Its memory is compared with that of a server with one schedule. Three shapes: all rules equal, 1,000 different
rules, all rules different. Each schedule has a body of 20 bytes of its own.

100,000 schedules are due at one time. The last successor is written with the last release, in the same frame. Then
10,000 schedules with different rules are each due once a minute, at random milliseconds, beside 1,000 messages a
second. Lateness is store_ms - due_ms of each release.

Not measured: puts over HTTP, and the time between a release's stamp and its fdatasync.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness import TOPIC, Server, messages, now_ms, quantiles, releases, wait_until
from benchmarks.report import Report
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import following
from timeball.broker.registry.schedules import ScheduleFacts
from timeball.broker.registry.zones import zone_of_rule
from timeball.model.config import Settings
from timeball.model.message import Kind
from timeball.node.node import Node

BYTES_BAR, START_BAR_S, LAST_BAR_S, LATENESS_BAR_MS = 200.0, 3.0, 1.0, 5.0
AT_ONCE = 1_000
REST_S = 3.0
SHAPES = {"equal rules": 1, "1,000 rules": 1_000, "different rules": 1_000_000}
STEADY_PER_S = 1_000
TICK_S = 0.01
RuleOf = Callable[[int], dict[str, object]]


def run(small: bool = False) -> Report:
    """Measure; memory in bytes, times in seconds, lateness in milliseconds."""
    report = Report("schedules", small)
    count = 2_000 if small else 1_000_000
    base_bytes = _memory(1, _yearly(1))[0]
    for shape, rules in SHAPES.items():
        held_bytes, start_s = _memory(count, _yearly(rules))
        report.add(f"{shape}: memory", (held_bytes - base_bytes) / count, "bytes", BYTES_BAR, "lower")
        report.add(f"{shape}: start", start_s, "s", START_BAR_S, "lower")
    _at_one_time(report, small)
    _beside_a_load(report, small)
    return report


def _yearly(rules: int) -> RuleOf:
    """Rules that are not due during the measurement."""
    month = time.gmtime(time.time() + 45 * 86_400).tm_mon

    def rule(number: int) -> dict[str, object]:
        minute = number % rules
        if rules <= 1_000:
            return {"cron": f"{minute % 60} {minute // 60} 1 {month} *", "zone": "Europe/Berlin"}
        return {"every": f"{90 * 86_400 + minute}s", "anchor": "2026-01-01T00:00:00Z"}

    return rule


def _memory(count: int, rule_of: RuleOf) -> tuple[int, float]:
    """Bytes that a server with these schedules holds, and seconds of its start."""
    with _filled(count, rule_of) as data:
        begin_s = time.monotonic()
        with Server(data, MALLOC_ARENA_MAX="1") as server:
            took_s = time.monotonic() - begin_s
            lowest, seen_s = server.memory_bytes()[0], time.monotonic()
            while time.monotonic() - seen_s < REST_S:
                time.sleep(0.2)
                if (held := server.memory_bytes()[0]) < lowest:
                    lowest, seen_s = held, time.monotonic()
            return lowest, took_s


def _at_one_time(report: Report, small: bool) -> None:
    count, ahead_s = (500, 30) if small else (100_000, 240)
    due_ms = (now_ms() // 1_000 + ahead_s) * 1_000
    rules: RuleOf = lambda _: {"every": "1h", "anchor": _instant(due_ms)}  # noqa: E731
    with _filled(count, rules) as data, Server(data) as server, server.client() as ball:
        assert now_ms() < due_ms, "the folder was written too slowly"
        begin_seq = ball.status()["log"]["next_seq"]
        wait_until(lambda: now_ms() >= due_ms - 1_000, ahead_s, "the due time")
        cpu_s = server.cpu_s()
        wait_until(
            lambda: ball.status()["log"]["durable_seq"] >= begin_seq + 3 * count - 1, 120, "the last one"
        )
        used_s = server.cpu_s() - cpu_s
        found = releases(ball, begin_seq)
    late_ms = found["store_ms"] - due_ms
    report.add("one time: missing or doubled", count - len(np.unique(found["source_seq"])), "messages")
    report.add("one time: last release", float(late_ms.max()) / 1_000, "s", LAST_BAR_S, "lower")
    report.add("one time: server CPU", used_s / count * 1e6, "us/msg")


def _beside_a_load(report: Report, small: bool) -> None:
    count, seconds = (100, 5) if small else (10_000, 90)
    period_ms = 4_000 if small else 60_000
    rng = np.random.default_rng(7)
    anchors = now_ms() + 20_000 + rng.integers(0, period_ms, count)
    rules: RuleOf = lambda number: {"every": f"{period_ms}ms", "anchor": _instant(int(anchors[number]))}  # noqa: E731
    with _filled(count, rules) as data, Server(data) as server, server.client() as ball:
        ball.create_topic(TOPIC, 8)
        wait_until(lambda: now_ms() >= int(anchors.min()), 60, "the first due time")
        begin_seq, cpu_s, begin_s, sent = (
            ball.status()["log"]["next_seq"],
            server.cpu_s(),
            time.monotonic(),
            0,
        )
        while (now_s := time.monotonic() - begin_s) < seconds:
            if (wanted := int(now_s * STEADY_PER_S)) > sent:
                due = now_ms() + rng.integers(200, 1_000, wanted - sent)
                ball.send_many(messages(wanted - sent, due, seed=wanted))
                sent = wanted
            time.sleep(TICK_S)
        share, end_ms = (server.cpu_s() - cpu_s) / (time.monotonic() - begin_s), now_ms()
        late: list[int] = []
        for rows in ball.read_log(begin_seq, ball.status()["log"]["durable_seq"], kinds=[Kind.RELEASE]):
            topics = rows.column("topic").to_pylist()
            lateness = np.asarray(rows.column("store_ms")) - np.asarray(rows.column("due_ms"))
            late += [int(ms) for ms, topic in zip(lateness, topics, strict=True) if topic == "ticks"]
    p50, p99, worst = quantiles(np.array(late))
    expected = count * (end_ms - int(anchors.min())) / period_ms
    report.add("a minute: released / expected", len(late) / expected, "")
    report.add("a minute: early", sum(ms < 0 for ms in late), "messages", bar=0, better="lower")
    report.add("a minute: lateness p50", p50, "ms")
    report.add("a minute: lateness p99", p99, "ms", LATENESS_BAR_MS, "lower")
    report.add("a minute: lateness max", worst, "ms")
    report.add("a minute: server CPU share", share * 100, "% of a core")


@contextmanager
def _filled(count: int, rule_of: RuleOf) -> Iterator[Path]:
    """A folder with schedules, written by a node of this process."""
    with tempfile.TemporaryDirectory(prefix="timeball-bench-") as folder:
        data = Path(folder) / "data"
        asyncio.run(_fill(data, count, rule_of))
        yield data


async def _fill(data: Path, count: int, rule_of: RuleOf) -> None:
    node = Node(Settings(data=data))
    await node.start(listen=False)
    broker = node.broker
    broker.appender.ensure_topics(["ticks"])
    # As a put does. Otherwise the start looks for the due times that a new tzdata has changed.
    broker.tables.zones.use(zone_of_rule(_facts(0, rule_of(0)).rule))
    for numbers in _slices(count):
        now = broker.clock.now_ms()
        nexts = [
            following(f"schedule-{number:07d}", _facts(number, rule_of(number)), None, now, now, is_put=True)
            for number in numbers
        ]
        continuation = broker.successors.continuation(nexts, now)
        durable = broker.appender.append(continuation.rows(broker.log.writer.next_seq)).durable
        continuation.apply()
        await durable
    await node.stop()


def _slices(count: int) -> Iterator[range]:
    return (range(begin, min(begin + AT_ONCE, count)) for begin in range(0, count, AT_ONCE))


def _facts(number: int, rule: dict[str, object]) -> ScheduleFacts:
    return ScheduleFacts(
        rule=msgspec.Raw(_canonical(json.dumps(rule))), topic="ticks", body=b"schedule %011d" % number
    )


@lru_cache(2_000)
def _canonical(rule: str) -> bytes:
    return Rule.parse(json.loads(rule)).text.encode()


def _instant(at_ms: int) -> str:
    at = np.datetime64(at_ms, "ms")
    return f"{at}Z"
