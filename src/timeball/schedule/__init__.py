"""The schedule: scheduled messages from the log row that accepts them until they are due.

One scheduler (`scheduler.py`) serves several backlogs, which all implement the same interface (`backlog.py`).

Receives: scheduled messages (`scheduled_rows` in the code) that are durable in the log, as column batches.
Keeps: an index of the pending messages, in memory and in the pending table. It is a cache of the log.
Hands on: messages that are due, in order, once.

| strategy        | idea                          | precision | reach              | disk per message| restart |
|-----------------|-------------------------------|-----------|--------------------|-----------------|---------|
| `hour_log`      | log tail, then sorted files   | 1 ms      | 10 years           | 160 B           | 1.8 s   |
| `timer_wheel`   | ring of slots with chains     | 1 ms      | its ring; 10 years | 54 B, log 289 B | 1.2 s   |
| `level_cascade` | hops over 32 levels           | 1 ms      | a day; 10 years    | 35 B, log 313 B | 1.1 s   |
| `delay_levels`  | one FIFO per level            | 1 ms      | its levels         | 18 B, log 412 B | 1.6 s   |

Where the column "reach" has two entries, messages beyond the first one are written to the log again on the way: the
timer wheel rolls them, the cascade takes further hops.

The next table contains the bytes written per byte of a message body, by the delay of the message. The CPU times are
those of admission, of moving to the table and of release, per message.

| strategy        | 10 s | 1 h | 3 d | 40 d | CPU, us       | recovery                                     |
|-----------------|------|-----|-----|------|---------------|----------------------------------------------|
| `hour_log`      | 4.7  | 6.0 | 7.2 | 7.2  | 1.0, 2.0, 1.5 | checkpoint, and the log's tail               |
| `timer_wheel`   | 4.9  | 5.0 | 6.1 | 37   | 1.3, -, 1.5   | checkpoint; the ring is rebuilt from it on   |
| `level_cascade` | 5.1  | 9.7 | 22  | 135  | 1.8, -, 1.8   | checkpoint; its queues from there on         |
| `delay_levels`  | 5.6  | 5.6 | -   | -    | its wire's    | saved offsets                                |

Source: `timeball bench designs`, with bodies of 128 bytes and a million pending messages. Restart times run from kill
-9 to the first release on time. More is in docs/designs.md.
"""
