"""Who consumes which queues, when the broker decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.remoting.handlers.assignments import ANY_QUEUE, STRATEGIES, assign

CLIENTS = st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=6, unique=True)
QUEUES = st.integers(1, 12).map(lambda count: list(range(count)))
NAMES = st.sampled_from(sorted(STRATEGIES))


@given(CLIENTS, QUEUES, NAMES)
def test_a_group_that_pulls_divides_the_queues(clients: list[str], queues: list[int], name: str) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=False, share_with=0) for c in clients]
    assert sorted(queue for share in shares for queue in share or []) == queues
    sizes = [len(share or []) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_the_shares_are_rocketmqs() -> None:
    def shares(name: str) -> list[list[int] | None]:
        return [
            assign(c, list(range(8)), ["c", "a", "b"], strategy=name, pops=False, share_with=0) for c in "abc"
        ]

    assert shares("AVG") == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert shares("AVG_BY_CIRCLE") == [[0, 3, 6], [1, 4, 7], [2, 5]]


@given(CLIENTS, QUEUES, NAMES, st.integers(1, 8))
def test_a_group_that_pops_shares_queues_with_neighbours_and_leaves_none(
    clients: list[str], queues: list[int], name: str, share_with: int
) -> None:
    shares = [assign(c, queues, clients, strategy=name, pops=True, share_with=share_with) for c in clients]
    assert {queue for share in shares for queue in share or []} == set(queues)
    assert all(shares)
    if share_with >= len(clients) - 1 and len(clients) <= len(queues):
        assert all(share == queues for share in shares)


def test_without_sharing_everybody_pops_from_any_queue() -> None:
    assert assign("x", [0, 1], ["a"], strategy="AVG", pops=True, share_with=0) == [ANY_QUEUE]


def test_what_cannot_be_said_is_none_and_a_stranger_gets_nothing() -> None:
    assert assign("a", [0], ["a"], strategy="MACHINE_ROOM", pops=False, share_with=0) is None
    assert assign("a", [0], [], strategy="AVG", pops=False, share_with=0) is None
    assert assign("a", [], ["a"], strategy="AVG", pops=False, share_with=0) is None
    assert assign("x", [0], ["a"], strategy="AVG", pops=False, share_with=0) == []
