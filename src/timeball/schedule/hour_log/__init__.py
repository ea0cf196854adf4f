"""`hour_log`: an LSM tree over due time, the default schedule for any instant.

    log tail      promises since the watermark W: two int64 per row in memory
    pending table immutable Parquet files sorted by due time; complete for all rows before W

Every promise that has not been opened is in exactly one place, the tail or a file. Moving W is an attach, which copies
no promise from one place to two.

With the scheduler it is the two-level wheel over hourly delay logs, with sorted files where that chains messages by the
second: files are open within two hours of now, a heap of used slots (`due_wheel.py`) takes the place of turning, and
what a successor starts from, the tick and the local index, is in the release records (`outcomes.py`).
"""
