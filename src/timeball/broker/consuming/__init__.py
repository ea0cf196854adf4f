"""Consuming: groups share messages out, each for a time, and answer with receipts.

engine.py           the verbs: receive, acknowledge, change the time, dead letter, give back
receipts.py         requests, received messages, receipts
selection.py        the positions one request gets
queue_leases.py     one queue of one group: leased, come back, done; leases.py: of all
memory_leases.py    leases in memory; redelivery.py: their ends; deadlines.py: when
log_leases.py       leases as promises in the log; lookup.py: their rows; crash_recovery.py: which positions are done
redelivery_rows.py  the rows that bring a message back
wait_queue.py       consumers that wait for the same
"""
