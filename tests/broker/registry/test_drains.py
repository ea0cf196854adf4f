"""Of each drain the last row counts, and a message that was handed over is never called cancelled."""

from __future__ import annotations

from timeball.broker.registry.drains import AdoptedFacts, DrainFacts, Drains
from timeball.broker.registry.meta import MetaLog
from timeball.model.answers import HANDED
from timeball.model.message import pairs_of


def reopened(rows: list[object]) -> Drains:
    """The drains of a log with these META rows."""
    meta = MetaLog()
    drains = Drains(meta)
    for row in rows:
        meta.restore(pairs_of(row))  # type: ignore[arg-type]
    return drains


def opened() -> tuple[Drains, list[object]]:
    meta, rows = MetaLog(), list[object]()
    drains = Drains(meta)
    meta.open(rows.append, lambda: 7)
    return drains, rows


def test_the_last_rows_of_both_sides_count_after_a_restart() -> None:
    drains, rows = opened()
    assert drains.out is None and drains.adopted("g2") is None
    drains.put(DrainFacts(heir="g1", since_ms=5))
    change = drains.changed(DrainFacts(heir="g1", since_ms=5, transfer=1, first_seq=9, rows=2, at_ms=6))
    assert drains.out is not None and not drains.out.transfer, "not before the append"
    rows.append(change.rows)
    change.keep()
    taken = drains.adoption_row("g3", AdoptedFacts(since_ms=1, transfer=4, rows=10))
    rows.append(taken.rows)
    taken.keep()
    for found in (drains, reopened(rows)):
        assert found.out == DrainFacts(heir="g1", since_ms=5, transfer=1, first_seq=9, rows=2, at_ms=6)
        assert found.adopted("g3") == AdoptedFacts(since_ms=1, transfer=4, rows=10)
        assert found.needed_seq == 9


def test_a_message_that_was_handed_over_is_not_called_cancelled() -> None:
    drains, _ = opened()
    assert not drains.was_handed_over("already_cancelled", None) and not drains.is_moving(None)
    drains.put(DrainFacts(heir="g1", since_ms=5, transfer=2, first_seq=9, rows=2, at_ms=6))
    assert drains.was_handed_over(HANDED, 3) and drains.was_handed_over("already_cancelled", None)
    assert not drains.was_handed_over("already_cancelled", 3) and not drains.was_handed_over("released", None)
    assert (drains.is_moving(5), drains.is_moving(6), drains.is_moving(None)) == (False, True, True)
    drains.put(DrainFacts(heir="g1", since_ms=5, transfer=2, moved_rows=2))
    assert not drains.is_moving(6) and drains.needed_seq is None
