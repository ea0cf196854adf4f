"""Message ids: one sequence for single ids and columns, and another one in each process."""

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
def test_bulk_and_single_ids_are_one_sequence(counts: list[int]) -> None:
    source = Identifiers()
    ids: list[str] = []
    for count in counts:
        ids += [source.next_id(), *next_ids(source, count).to_pylist()]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert [int(one[24:], 16) for one in ids] == list(range(len(ids)))


def test_bulk_arrays_are_sound() -> None:
    ids = next_ids(Identifiers(), 100_000)
    ids.validate(full=True)
    assert ids.null_count == 0 and len(ids.unique()) == 100_000


def test_two_processes_never_share_an_identity() -> None:
    assert len({Identifiers().next_id()[:24] for _ in range(100)}) == 100


def test_a_used_up_counter_begins_a_new_identity() -> None:
    source = Identifiers()
    source._next = COUNTER_END - 2
    last = source.next_id()
    rest = next_ids(source, 3).to_pylist()
    assert last.endswith("fffffffe") and rest[0].endswith("00000000")
    assert {one[:24] for one in rest} != {last[:24]}


def test_threads_share_a_source() -> None:
    source = Identifiers()
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda _: [source.next_id() for _ in range(500)], range(8)))
    assert len({one for part in parts for one in part}) == 4_000


def test_more_ids_than_an_array_has_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        next_ids(Identifiers(), ROWS_MAX + 1)


def test_a_forked_child_makes_other_ids() -> None:
    # In a fresh interpreter: a fork of this one, with gRPC's threads in it, would be unsafe.
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
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=True
    )
    ids = run.stdout.split()
    assert len(ids) == 2 and ids[0][:24] != ids[1][:24]
