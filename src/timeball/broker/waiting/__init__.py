"""Reads of what waits, for people and programs: pages of messages, and counts by the time at which they are due.

    snapshot.py    which promises wait at one instant: where they lie, and which of them are settled
    log_tail.py    those of the log, sorted, kept between two reads
    table_walk.py  those of the pending table, row group by row group
    pages.py       requests and their answers
    listing.py     a page of them
    forecast.py    how many are due in each second, minute, hour or day

A read takes its snapshot on the event loop, in some microseconds, and does all its work in the background thread.
"""
