"""Consuming: groups share messages out, each for a time, and answer with receipts.

engine.py           the verbs: receive, acknowledge, change the time, dead letter, give back
requests.py         requests, received messages, receipts, subscriptions
selection.py        the positions one request gets
leases.py           one queue of one group: leased, come back, done; and all of them
memory_leases.py    leases in memory; redelivery.py: their ends, and when
log_leases.py       leases as promises in the log; lookup.py: their rows
redelivery_rows.py  the rows that bring a message back
group_places.py     how far each group is with one message
restart.py          leases after a crash, and across an orderly stop
"""
