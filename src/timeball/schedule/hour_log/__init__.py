"""`hour_log`: an LSM tree over due time, the default schedule for any instant.

    log tail      promises since the watermark W: two int64 per row in memory
    pending table immutable Parquet files sorted by due time; complete for all rows before W
    second wheel  what is due before the horizon, bodies loaded, a slot a second

Every promise is in exactly one place: below the *horizon* H = (due_ms, seq) it is in the wheel or settled, at or
above it in the tail or a file. Moving the horizon is a gather; moving W is an attach; neither copies a
promise from one place to two.
"""
