"""The figures of a bridge are numbers that a status line names."""

from __future__ import annotations

import msgspec

from timeball.edges.kafka.options import Counts


def test_each_figure_is_explained() -> None:
    counts = msgspec.to_builtins(Counts(taken=3))
    assert counts["taken"] == 3 and set(counts.values()) == {0, 3}
    assert all(name in (Counts.__doc__ or "") for name in counts)
