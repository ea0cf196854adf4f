"""The counts of a bridge are numbers that begin at 0, and the docstring describes each."""

from __future__ import annotations

import msgspec

from timeball.edges.kafka.options import Counts


def test_each_count_begins_at_0_and_is_in_the_docstring() -> None:
    counts = msgspec.to_builtins(Counts())
    assert set(counts.values()) == {0}
    assert all(name in (Counts.__doc__ or "") for name in counts)
