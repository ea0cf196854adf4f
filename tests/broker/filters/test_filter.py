"""The filter that lets everything pass."""

from __future__ import annotations

from tests.broker.filters.messages import entries_of, tagged

from timeball.broker.filters import EVERYTHING


def test_everything_passes() -> None:
    assert EVERYTHING.matches_all
    assert EVERYTHING.candidates(entries_of([0, -1, 5])).tolist() == [True] * 3
    assert EVERYTHING.exact(tagged([None, "a"])).tolist() == [True] * 2
    assert EVERYTHING.exact(tagged([])).tolist() == EVERYTHING.candidates(entries_of([])).tolist() == []
