"""The counts of a bridge are numbers, and each is described."""

from __future__ import annotations

import msgspec

from timeball.edges.kafka.options import Counts


def test_the_docstring_explains_each_count() -> None:
    counts = msgspec.to_builtins(Counts(taken=3))
    assert counts["taken"] == 3 and set(counts.values()) == {0, 3}
    assert all(name in (Counts.__doc__ or "") for name in counts)
