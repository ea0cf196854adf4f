"""Waiting: one scheduler (`scheduler.py`), over four designs that answer five questions (`backlog.py`).

Receives: promises that the log has made durable, as column batches.
Keeps: an index of what waits, in memory and in the pending table; a cache of the log.
Hands on: promises that are due, in order, once.

| strategy        | idea                          | precision | reach              | disk a promise  | restart |
|-----------------|-------------------------------|-----------|--------------------|-----------------|---------|
| `hour_log`      | tail, and sorted files        | 1 ms      | 10 years           | 160 B           | 1.8 s   |
| `timer_wheel`   | ring of slots, chains; rolled | 1 ms      | its ring; 10 years | 54 B, log 289 B | 1.2 s   |
| `level_cascade` | hops over 32 levels           | 1 ms      | a day; 10 years    | 35 B, log 313 B | 1.1 s   |
| `delay_levels`  | a FIFO a level                | 1 ms      | its levels         | 18 B, log 412 B | 1.6 s   |

Bytes written for a byte of a body that waits so long, CPU of admission, of moving to the table, of release:

| strategy        | 10 s | 1 h | 3 d | 40 d | CPU, us       | recovery                                     |
|-----------------|------|-----|-----|------|---------------|----------------------------------------------|
| `hour_log`      | 4.7  | 6.0 | 7.2 | 7.2  | 1.0, 2.0, 1.5 | checkpoint, and the log's tail               |
| `timer_wheel`   | 4.9  | 5.0 | 6.1 | 37   | 1.3, -, 1.5   | checkpoint; the ring is revised from it on   |
| `level_cascade` | 5.1  | 9.7 | 22  | 135  | 1.8, -, 1.8   | checkpoint; its queues from there on         |
| `delay_levels`  | 5.6  | 5.6 | -   | -    | its wire's    | saved offsets                                |

Measured by `timeball bench designs` with bodies of 128 bytes and a million waiting; restarts from kill -9 to the first
release on time. docs/designs.md has the rest.
"""
