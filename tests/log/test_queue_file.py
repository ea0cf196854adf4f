"""One file of the queue index: what is read is what was written, or it is Corrupt."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeball.errors import Corrupt
from timeball.log.queue_file import BLOCK_ENTRIES, ENTRY, EntryArray, Part, QueueFile, encode


def entries(first_seq: int, count: int) -> EntryArray:
    made = np.empty(count, ENTRY)
    seqs = np.arange(first_seq, first_seq + count)
    made["seq"], made["size"], made["tag"] = seqs, seqs % 1_000, -seqs
    return made


def parts() -> list[Part]:
    return [
        Part("orders", 0, 7, entries(1, 3)), Part("orders", 4, 0, entries(4, 2 * BLOCK_ENTRIES + 5)),
        Part("%RETRY%g", 0, 2**40, entries(900, BLOCK_ENTRIES)),
    ]  # fmt: skip


def said(found: list[Part]) -> list[tuple[str, int, int, bytes]]:
    return [(part.topic, part.queue_id, part.first_offset, part.entries.tobytes()) for part in found]


def test_what_was_written_is_read() -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert (file.first_seq, file.next_seq, len(file)) == (1, 2_000, 3 * BLOCK_ENTRIES + 8)
    assert said(file.parts()) == said(parts())
    assert QueueFile("a.cq", encode(5, 9, [])).parts() == []


@given(st.integers(0, 2 * BLOCK_ENTRIES + 5), st.integers(0, 2 * BLOCK_ENTRIES + 5))
def test_any_part_of_a_run_can_be_read(begin: int, end: int) -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert file.read(1, begin, end).tolist() == parts()[1].entries[begin:end].tolist()


def test_an_entry_has_the_width_and_the_order_of_rocketmq_s() -> None:
    made = np.array([(5, 111, -2)], ENTRY)
    assert encode(1, 6, [Part("t", 0, 0, made)])[-20:] == struct.pack(">qiq", 5, 111, -2)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_corrupt_and_never_another_entry(data: st.DataObject) -> None:
    whole = encode(1, 2_000, parts())
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        QueueFile("a.cq", bytes(flipped)).parts()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, -1, -20])
def test_a_file_that_was_cut_is_corrupt(size: int) -> None:
    with pytest.raises(Corrupt, match=r"^a.cq: "):
        QueueFile("a.cq", encode(1, 2_000, parts())[:size])


def test_entries_in_another_byte_order_are_written_in_theirs() -> None:
    joined = np.concatenate([entries(1, 2), entries(3, 2)])
    assert (
        QueueFile("a.cq", encode(1, 5, [Part("t", 0, 0, joined)])).parts()[0].entries.tolist()
        == joined.tolist()
    )
