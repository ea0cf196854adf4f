"""An entry's bytes: those of RocketMQ's consume queue, with the row's number in place of the position."""

import struct

import numpy as np

from timeball.log.queue_entry import ENTRY


def test_an_entry_is_rocketmqs() -> None:
    entries = np.array([(1 << 40, 300, -7)], ENTRY)
    assert entries.tobytes() == struct.pack(">qiq", 1 << 40, 300, -7)
