"""`bench designs`: each design does its work on a small scale, and every scheduled message of it is accounted for.

The figures of the served part mean nothing here. Those of the lives, in virtual time, are counts: some of them can be
checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import designs, designs_picture
from benchmarks.designs_compared import DESIGNS, HOUR_MS, Design, Ledger, Tally, level_of
from benchmarks.designs_lives import DELAYS_MS, Life, live
from benchmarks.report import Comparison, Report, brief
from tests.rounds import rounds
from tests.test_benchmarks_run import faults_of

NAMES = [design.name for design in DESIGNS]
SERVED = [
    "admit: rate",
    "admit: server CPU",
    "waiting: RAM",
    "waiting: disk, its own files",
    "waiting: disk, the log that must stay",
    "burst: server CPU",
    "overdue: rate",
    "steady: lateness p50",
    "steady: lateness p99",
    "steady: lateness max",
    "restart, all saved: first release on time",
    "restart, nothing saved yet: first release on time",
]


def named(name: str) -> Design:
    """Return the design with this name."""
    return next(design for design in DESIGNS if design.name == name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.siege
@pytest.mark.parametrize("name", NAMES[: rounds(1, len(NAMES))])
def test_a_design_does_the_work_and_every_scheduled_message_is_accounted_for(name: str) -> None:
    """Each is released once and none early, in all pieces of work, also after a kill -9."""
    comparison = designs.run(small=True, designs=[named(name)])
    (report,) = comparison.columns
    values = {figure.name: figure.value for figure in report.figures}
    assert [figure for figure in SERVED if figure not in values] == []
    assert (values["missing or doubled"], values["early"]) == (0, 0)
    assert values["kept once"] > 10_000
    assert [
        fault for figure in report.figures for fault in faults_of(figure.name, figure.unit, figure.value)
    ] == []
    assert ("to the table: server CPU" in values) == (name == "hour_log")
    for start in ("second's begin", "last instant"):
        at_once = f"burst: all on disk, from the {start}"
        assert (at_once in values) == (name != "delay_levels"), "delay levels have no such second"
    shown = "\n".join(comparison.lines())
    assert name in shown and "the figures mean nothing" in shown


# ---- the lives ------------------------------------------------------------------------------------------


def lived(name: str, delay: str, folder: Path, rows: int = 1_000) -> Life | None:
    """Run the life of a design, and check its ledger. Returns None if no level has this delay."""
    life = live(named(name), DELAYS_MS[delay], rows, folder / "data", small=True)
    if life is not None:
        tally = Tally()
        tally.add(name, life.ledger, life.rows, life.due_before_ms)
        assert (tally.kept_once, tally.wrong, tally.early, tally.notes) == (rows, 0, 0, [])
    return life


@pytest.mark.parametrize("name", NAMES)
def test_a_life_of_ten_seconds_writes_each_scheduled_message_and_its_release(
    name: str, tmp_path: Path
) -> None:
    """Twice the body at least, with the other columns of a row. The written pages contain the log."""
    life = lived(name, "10 s", tmp_path)
    assert life is not None
    assert 2 < life.logged < 10
    assert life.written_bytes == 0 or life.written > life.logged


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("hour_log", 0, 0), ("timer_wheel 1 s", 0, 1), ("level_cascade", 3, 12)],
)
def test_three_days_of_waiting_follow_the_design(name: str, least: int, most: int, tmp_path: Path) -> None:
    """`hour_log` moves messages to the table and not in the log. The ring reaches about three days. A cascade hops."""
    life = lived(name, "3 d", tmp_path)
    assert life is not None
    assert least <= life.ledger.moved_rows / life.rows <= most
    assert life.logged > 2 + least


def test_no_level_waits_three_days(tmp_path: Path) -> None:
    """A delay that no level has is left out, not approximated."""
    assert lived("delay_levels", "3 d", tmp_path) is None
    assert (level_of(10_000), level_of(HOUR_MS), level_of(11_000)) == (3, 17, None)


# ---- the account, and its controls ------------------------------------------------------------------------


def ledger(released: list[tuple[int, int, int]]) -> Ledger:
    """Return a ledger of messages 1, 2 and 3 due at 10, 20 and 30. A release: (message, due time, store time)."""
    columns = np.array(released, dtype=np.int64).reshape(-1, 3).T
    return Ledger(np.array([1, 2, 3]), np.array([10, 20, 30]), *columns)


def account(ledger: Ledger, promised: int = 3) -> tuple[int, int, int]:
    """Return how many messages of a ledger are kept, wrong and early."""
    tally = Tally()
    tally.add("test", ledger, promised, 25)
    assert bool(tally.notes) == bool(tally.wrong or tally.early)
    return tally.kept_once, tally.wrong, tally.early


def test_a_ledger_without_faults_is_counted() -> None:
    """Messages that are due later may be released or not."""
    assert account(ledger([(1, 10, 10), (2, 20, 21)])) == (2, 0, 0)
    assert account(ledger([(1, 10, 10), (2, 20, 21), (3, 30, 30)])) == (3, 0, 0)


@pytest.mark.parametrize(
    ("released", "promised", "wrong", "early"),
    [
        ([(1, 10, 10)], 3, 1, 0),
        ([(1, 10, 10), (1, 10, 11), (2, 20, 20)], 3, 1, 0),
        ([(1, 10, 10), (2, 20, 20), (9, 20, 20)], 3, 1, 0),
        ([(1, 10, 10), (2, 21, 22)], 3, 1, 0),
        ([(1, 10, 9), (2, 20, 20)], 3, 0, 1),
        ([(1, 10, 10), (2, 20, 20)], 4, 1, 0),
    ],
    ids=["missing", "doubled", "never promised", "another instant", "early", "accepted and not in the log"],
)
def test_a_fault_is_counted(
    released: list[tuple[int, int, int]], promised: int, wrong: int, early: int
) -> None:
    assert account(ledger(released), promised)[1:] == (wrong, early)


# ---- what is shown ----------------------------------------------------------------------------------------


def compared(small: bool = False) -> Comparison:
    """Return figures that are made up."""
    comparison = Comparison("designs", small)
    for index, design in enumerate(DESIGNS):
        report = Report(design.name, small)
        report.add("admit: rate", 300_000 + index, "msg/s")
        report.add("steady: lateness p99", 2 + 10 * index, "ms", bar=20, better="lower")
        for delay in list(DELAYS_MS)[: 2 if design.by_level else 4]:
            report.add(f"written, waiting {delay}", 4.5 + index, "bytes/byte")
        comparison.columns.append(report)
    return comparison


def document(small: bool = False) -> dict[str, Any]:
    """Return the figures as they are printed with --json."""
    decoded: dict[str, Any] = json.loads(json.dumps(compared(small).as_dict()))
    return decoded


def test_the_table_has_the_strategies_as_columns() -> None:
    """A figure that misses its bar is marked. A figure that a strategy does not have is a dash."""
    title, head, *rows = compared().lines()
    assert title == "designs"
    assert [name for name in NAMES if name not in head] == [] and head.endswith("bar")
    cells = {row.split("  ")[1]: row.split() for row in rows}
    assert cells["steady: lateness p99, ms"][-5:] == ["22!", "32!", "42!", "<=", "20"]
    assert cells["written, waiting 3 d, bytes/byte"][-1] == "-"
    assert compared().value("level_cascade", "written, waiting 3 d") == 7.5
    assert compared().value("delay_levels", "written, waiting 3 d") is None


def test_the_document_has_a_row_for_each_strategy() -> None:
    """The output of --json."""
    decoded = document(small=True)
    assert (decoded["benchmark"], decoded["small"]) == ("designs", True)
    assert [row["name"] for row in decoded["rows"]] == NAMES
    assert decoded["rows"][0]["figures"][0].keys() == {"name", "value", "unit", "bar", "ratio"}


def test_numbers_are_brief() -> None:
    assert [brief(value) for value in (0, 0.123, 12.34, 123.4, 1_234_567, 20)] == [
        "0", "0.12", "12.3", "123", "1,234,567", "20",
    ]  # fmt: skip


def test_the_page_gets_the_table_between_its_marks() -> None:
    """The rest of the page does not change."""
    table = designs_picture.markdown(document())
    assert table.splitlines()[0].count("|") == len(NAMES) + 2
    assert "| written, waiting 3 d, bytes/byte | 4.50 | 5.50 | 6.50 | 7.50 | – |" in table
    page = designs_picture.into_page("a\n<!-- figures -->\nold\n<!-- /figures -->\nb\n", table)
    assert page.startswith("a\n<!-- figures -->\n") and page.endswith("<!-- /figures -->\nb\n")
    assert "old" not in page and table in page
    with pytest.raises(ValueError, match="figures"):
        designs_picture.into_page("a\n", table)


def test_the_picture_shows_every_design(tmp_path: Path) -> None:
    """It is drawn where matplotlib is installed. A missing figure has no bar."""
    pytest.importorskip("matplotlib")
    file = tmp_path / "designs.png"
    designs_picture.draw(document(), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert len(designs_picture.COLOURS) >= len(NAMES)


def test_figures_of_a_small_run_do_not_reach_the_page(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(document(small=True)), "utf-8")
    with pytest.raises(SystemExit, match="mean nothing"):
        designs_picture.main([str(file)])
