"""`hour_log`: an LSM tree over due time, the default schedule for any instant.

    log tail      promises since the watermark W: two int64 per row in memory
    pending table immutable Parquet files sorted by due time; complete for all rows before W
    second wheel  what is due before the horizon, bodies loaded, a slot a second

Every promise is in exactly one place: below the *horizon* H = (due_ms, seq) it is in the wheel, left to a dispatcher,
or settled, at or above it in the tail, in a file, or parked with its body because the clock went back. Moving H
is a gather; moving W is an attach; neither copies a promise from one place to two.

It is the two-level wheel over hourly delay logs, with sorted files where that chains messages by the second: files
are open within two hours of the horizon, a heap of used slots takes the place of turning, and what a successor
starts from, the tick and the local index, is in the release records (`schedule/tick.py`).
"""
