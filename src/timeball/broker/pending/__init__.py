"""Reads of pending messages, for people and programs: pages of messages, and counts by due time.

    snapshot.py    the pending scheduled messages at one time: where they are stored, and which messages are settled.
                   Also the messages of the log, sorted and kept between two reads
    listing.py     a page of pending messages, and the walk through the table, row group by row group
    forecast.py    counts of the messages that are due in each second, minute, hour or day
    recurring_load.py  the same of occurrences of recurring schedules that are no messages yet

Requests and answers are in model/answers.py. A read takes its snapshot on the event loop, in some microseconds, and
does all its work in the background thread. Settled means released or cancelled.
"""
