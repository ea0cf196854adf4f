"""An entry of the queue index: the location of one message, in RocketMQ's width, with its size and tag."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ENTRY = np.dtype(
    [
        ("seq", ">i8"),  # sequence number in the log
        ("size", ">i4"),  # bytes of the message as RocketMQ stores it
        ("tag", ">i8"),  # tag hash or bits, or due time (ms) in a delay-level queue
    ]
)
assert ENTRY.itemsize == 20  # the same as RocketMQ's
EntryArray = npt.NDArray[np.void]
