"""Who goes on under which number: the end of each chain is found as long as its first instant lies ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.schedule import moved
from timeball.schedule.moved import Moved

CHAINS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=8)


def end_of(moves: Moved, seq: int) -> int:
    while (following := moves.next_of(seq)) is not None:
        seq = following
    return seq


def moves_of(chains: list[list[int]]) -> tuple[list[tuple[int, int, int]], dict[int, tuple[int, int]]]:
    """Moves in the log's order, chains mixed; and of each number its instant and where its chain ends."""
    rows, ends = [], {}
    numbers = [list(range(100 * c, 100 * c + len(chain) + 1)) for c, chain in enumerate(chains)]
    for step in range(6):
        for chain, seqs in zip(chains, numbers, strict=True):
            if step < len(chain):
                rows.append((chain[step], seqs[step], seqs[step + 1]))
                ends[seqs[step]] = (chain[step], seqs[-1])
    return rows, ends


@given(CHAINS, st.integers(0, 10), st.booleans())
def test_each_number_that_is_not_forgotten_leads_to_the_end(
    chains: list[list[int]], before_ms: int, again: bool
) -> None:
    rows, ends = moves_of(chains)
    moves = Moved()
    for row in rows:
        moves.add([row])
    if again:
        moves.forget_before(before_ms // 2)
    moves.forget_before(before_ms)
    restored = Moved()
    restored.add(moves.rows())
    kept = {seq: end for seq, (due_ms, end) in ends.items() if due_ms >= before_ms}
    for known in (moves, restored):
        assert len(known) == len(kept)
        assert {seq: end_of(known, seq) for seq in kept} == kept
        assert all(known.next_of(seq) is None for seq in ends.keys() - kept.keys())


def test_many_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "RECENT_MAX", 10)
    moves = Moved()
    for seq in range(0, 100, 2):
        moves.add([(seq, seq, 1_000 + seq)])
    assert len(moves) == 50
    assert [moves.next_of(seq) for seq in (0, 1, 42, 98, 99)] == [1_000, None, 1_042, 1_098, None]
    moves.forget_before(90)
    assert moves.rows() == [(seq, seq, 1_000 + seq) for seq in (90, 92, 94, 96, 98)]


def test_nothing_was_ever_moved() -> None:
    moves = Moved()
    moves.forget_before(1 << 40)
    assert (len(moves), moves.rows(), moves.next_of(5)) == (0, [], None)
