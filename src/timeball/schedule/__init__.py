"""Waiting: four designs behind one contract (`strategy.py`), and the ticker that wakes them.

Receives: promises that the log has made durable, as column batches.
Keeps: an index of what waits, in memory and in the pending table; a cache of the log.
Hands on: what is due, in order, once.

| strategy       | idea                                             | precision | reach     | recovery          |
|----------------|--------------------------------------------------|-----------|-----------|-------------------|
| `hour_log`     | tail in memory, sorted files, wheel for the near | 1 ms      | 10 years  | checkpoint + tail |
| `delay_levels` | a FIFO a level, in the index of its queue        | 1 ms      | its table | saved offsets     |

`timer_wheel` and `level_cascade` join this table with the release that brings them.
"""
