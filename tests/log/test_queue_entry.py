"""The bytes of an entry are those of RocketMQ's consume queue, with the row number instead of the position."""

import struct

import numpy as np

from timeball.log.format import ENTRY


def test_an_entry_is_rocketmqs() -> None:
    entries = np.array([(1 << 40, 300, -7)], ENTRY)
    assert entries.tobytes() == struct.pack(">qiq", 1 << 40, 300, -7)
