"""`hour_log`: an LSM tree over due time, and the default strategy for any due time.

    log tail      messages since the watermark W: two int64 per row in memory
    pending table immutable Parquet files sorted by due time; complete for all rows before W

Every unopened message is in exactly one of these, the tail or a file. An attach moves W, so no message is in both.

Together with the scheduler this is a two-level timing wheel over hourly delay logs. Sorted files replace the chains of
messages by the second. Files are open within two hours of now. A heap of used slots (`due_wheel.py`) replaces the
turning of the wheel. The tick and the local index, from which a successor starts, are in the release records
(`outcomes.py`).
"""
