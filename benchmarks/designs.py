"""The designs of waiting, side by side: the same work for each, one table.

Columns: `hour_log`, `timer_wheel` with slots of 1 s and of 1 ms, `level_cascade`, `delay_levels`. The work, on a
real broker (designs_served.py): two million scheduled messages of 128 bytes admitted, and what they take while they
wait; a million due in one second; a million overdue at once; 10,000 a second due at random milliseconds; kill -9 with a
million waiting. And in virtual time (designs_lives.py) the bytes written for a scheduled message that waits 10 s, 1 h,
3 d and 40 d. In each piece of work every scheduled message is accounted for: the last rows of the table. All of it
takes half an hour.

`delay_levels` does what levels can express: no 3 d, and no million in one second, since they fall due as fast as they
came (*overdue* has them at once). Its scheduled messages come over RocketMQ's wire, one a request, so that its rate of
admission, and the frames in its log, are mostly the wire's.

Not measured: consumers (none is pulling), other disks, a cold page cache, bodies of other sizes (rewriting costs in
proportion), cancels, compaction by Spark, a ring of another reach; in the lateness the time between a release's stamp
and the end of its fdatasync; in the lives time and CPU (their clock is moved by hand), and scheduled messages that come
or fall due alone, which cost every design a page more each time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.designs_compared import DESIGNS, Design, Tally
from benchmarks.designs_lives import DELAYS_MS, live
from benchmarks.designs_served import Bench
from benchmarks.report import Comparison, Report

LIFE_ROWS, LIFE_ROWS_SMALL = 50_000, 1_000


def run(small: bool = False, designs: Sequence[Design] = tuple(DESIGNS)) -> Comparison:
    """Measure; a column each."""
    comparison = Comparison("designs", small)
    for design in designs:
        report, tally = Report(design.name, small), Tally()
        if sys.stderr.isatty():
            sys.stderr.write(f"{design.name}: some minutes\n")  # or half an hour would pass without a word
        Bench(design, report, tally).all()
        _lives(design, report, tally)
        report.add("kept once", tally.kept_once, "messages")
        report.add("missing or doubled", tally.wrong, "messages", bar=0, better="lower")
        report.add("early", tally.early, "messages", bar=0, better="lower")
        comparison.columns.append(report)
    return comparison


def _lives(design: Design, report: Report, tally: Tally) -> None:
    for name, delay_ms in DELAYS_MS.items():
        with tempfile.TemporaryDirectory(prefix="timeball-bench-") as folder:
            rows = LIFE_ROWS_SMALL if report.small else LIFE_ROWS
            life = live(design, delay_ms, rows, Path(folder) / "data", report.small)
        if life is None:
            continue
        tally.add(f"life of {name}", life.ledger, life.rows, life.due_before_ms)
        if life.written_bytes:
            report.add(f"written, waiting {name}", life.written, "bytes/byte")
        report.add(f"moved in the log, waiting {name}", life.ledger.moved_rows / life.rows, "times")
