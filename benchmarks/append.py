"""Append rate and acknowledgement latency through Flight, fdatasync before every acknowledgement.

Four ways to send: one row at a time (each waits for its acknowledgement), 64 single rows in flight, and
batches of 1,000 and 10,000 rows with 8 in flight. 128-byte bodies with ids; ordinary messages.

Not measured: the network (loopback), other disks, several clients at once, the RocketMQ wire; making the
batches (done before the clock starts). The client's own CPU shares the machine but is not in CPU per message.
The bar is the design's for the whole broker per core over its RocketMQ edge; here it is a yardstick only.
"""

from __future__ import annotations

from benchmarks.harness import Server, messages, quantiles, serving
from benchmarks.report import Report
from benchmarks.stream import drive

RATE_BAR = 200_000.0
CASES = [  # label, rows a batch, batches in flight, batches (small, full)
    ("1 row, 1 in flight", 1, 1, (20, 2_000)),
    ("1 row, 64 in flight", 1, 64, (100, 20_000)),
    ("1,000 rows, 8 in flight", 1_000, 8, (4, 1_000)),
    ("10,000 rows, 8 in flight", 10_000, 8, (2, 200)),
]


def run(small: bool = False) -> Report:
    """Measure; rates in messages a second, latencies in milliseconds."""
    report = Report("append", small)
    with serving() as (server, _):
        drive(server.endpoint, [messages(1)] * 20, 1)  # the first calls pay for code paths never run before
        for label, rows, in_flight, (few, many) in CASES:
            _case(report, server, label, rows, in_flight, few if small else many)
    return report


def _case(report: Report, server: Server, label: str, rows: int, in_flight: int, batches: int) -> None:
    prepared = [messages(rows, seed=1 + number % 16) for number in range(min(batches, 16))]
    load = [prepared[number % len(prepared)] for number in range(batches)]
    with server.spending(label) as spent:
        latency_ms, seconds = drive(server.endpoint, load, in_flight)
    sent = rows * batches
    p50, p99, worst = quantiles(latency_ms)
    bar = RATE_BAR if rows == 10_000 else None
    report.add(f"{label}: rate", sent / seconds, "msg/s", bar)
    report.add(f"{label}: ack p50", p50, "ms")
    report.add(f"{label}: ack p99", p99, "ms")
    report.add(f"{label}: ack max", worst, "ms")
    report.add_cost(spent, sent)
