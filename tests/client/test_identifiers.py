"""Message ids: one sequence for single ids and columns, and another identity in each process."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bounds import BOUND_S

from timeball.client.identifiers import COUNTER_END, Identifiers
from timeball.client.outgoing import ROWS_MAX, next_ids


@given(st.lists(st.integers(0, 300), max_size=6))
def test_ids_made_one_by_one_and_in_bulk_continue_one_sequence(counts: list[int]) -> None:
    source = Identifiers()
    ids: list[str] = []
    for count in counts:
        ids += [source.next_id(), *next_ids(source, count).to_pylist()]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-9a-f]{32}", id_) for id_ in ids)
    assert [int(id_[24:], 16) for id_ in ids] == list(range(len(ids)))


def test_a_bulk_of_ids_is_a_valid_array_of_distinct_ids() -> None:
    ids = next_ids(Identifiers(), 100_000)
    ids.validate(full=True)
    assert ids.null_count == 0 and len(ids.unique()) == 100_000


def test_each_source_has_its_own_identity() -> None:
    assert len({Identifiers().next_id()[:24] for _ in range(100)}) == 100


def test_ids_that_do_not_fit_into_the_counter_get_a_new_identity() -> None:
    source = Identifiers()
    source._next = COUNTER_END - 2
    last_id = source.next_id()
    next_three = next_ids(source, 3).to_pylist()
    # The first 24 hex digits are the identity, the last 8 the counter.
    assert last_id.endswith("fffffffe") and next_three[0].endswith("00000000")
    assert {id_[:24] for id_ in next_three} != {last_id[:24]}


def test_threads_that_share_a_source_get_distinct_ids() -> None:
    source = Identifiers()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda _: [source.next_id() for _ in range(500)], range(8)))
    assert len({id_ for part in parts for id_ in part}) == 4_000


def test_more_ids_than_an_array_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        next_ids(Identifiers(), ROWS_MAX + 1)


def test_a_forked_child_has_another_identity_than_its_parent() -> None:
    # In a new interpreter, because a fork of this process, with the threads of gRPC, would be unsafe.
    program = """
import os
from timeball.client.identifiers import IDENTIFIERS
parent = IDENTIFIERS.next_id()
child = os.fork()
if child:
    os.waitpid(child, 0)
print(IDENTIFIERS.next_id(), flush=True)
os._exit(0)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    ids = process.stdout.split()
    assert len(ids) == 2 and ids[0][:24] != ids[1][:24]
