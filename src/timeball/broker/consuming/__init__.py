"""Message consumption: consumer groups lease messages for a limited time and answer with receipts.

engine.py             the operations: receive, acknowledge, change the invisible time, dead letter, give back
requests.py           requests, received messages, receipts, subscriptions
selection.py          the positions that one request leases, and their rows after the exact decision of the filter
leases.py             the leases of a group in a queue (in flight, returned, done), and of all groups and queues
memory_leases.py      leases in memory
redelivery.py         redelivery of messages whose leases in memory have ended
log_leases.py         leases as scheduled messages in the log
log_leases.py         the newest versions of these messages, concurrent answers to a lease, and CANCEL rows that end it
log_leases.py   acknowledgements of leases in the log
lookup.py             look-up of the rows of these scheduled messages
redelivery_rows.py    the rows that bring a message back to its group
retry.py              retries that RocketMQ's clients request
pull.py               reads by offset
dead_letters.py       listing, resending and deleting dead letters
pull.py          reads of new messages without a group
retention.py          segments that are kept for unread messages
group_places.py       the state of one message in each group
engine.py      detection of different filters in one group
memory_leases.py            leases after a crash, and across an orderly stop
engine.py             the engine with spans
"""
