"""Bars in the terminal."""

from hypothesis import given
from hypothesis import strategies as st

from timeball.cli.output import bars


def test_the_longest_bar_is_as_wide_as_it_may_be() -> None:
    """And the others are in proportion."""
    lines = bars({"a": 10, "bb": 5, "c": 0}, width=10)
    assert [line.count("█") for line in lines] == [10, 5, 0]
    assert len({len(line) for line in lines}) == 1


def test_nothing_gives_no_lines() -> None:
    """An empty chart is no error."""
    assert bars({}) == []


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 10**12), min_size=1))
def test_whatever_is_there_shows(counts: dict[str, int]) -> None:
    """One scheduled message beside a million still has a bar, and nothing has none."""
    for line, count in zip(bars(counts), counts.values()):
        assert ("█" in line) == (count > 0)
