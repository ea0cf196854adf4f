"""Reads of pending messages, for people and programs: pages of messages, and counts by due time.

    snapshot.py        the pending scheduled messages at one time: where they are stored, and which ones are settled.
                       Also the messages of the log, sorted, in memory between two reads
    listing.py         a page of pending messages, and the walk through the table, row group by row group
    forecast.py        counts of the messages that are due in each second, minute, hour or day
    recurring_load.py  counts of the occurrences of recurring schedules that are no messages yet
    window_loads.py    choices of due times in delivery windows, by these counts
    survey.py          the number and samples of the messages of a selection
    wakers.py          writes wake-ups for messages that selections have made due earlier
    zone_updates.py    moves due times after an update of tzdata

Requests and answers are in model/answers.py. A read takes its snapshot on the event loop, in some microseconds, and
does all its work in the background thread. Settled means released or cancelled.
"""
