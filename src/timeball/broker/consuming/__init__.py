"""Message consumption: consumer groups lease messages for a limited time and answer with receipts.

engine.py             the operations: receive, acknowledge, change the invisible time, dead letter, give back. Also
                      the engine with spans, and the detection of different filters in one group
requests.py           requests, received messages, receipts, subscriptions
selection.py          the positions that one request leases, and their rows after the exact decision of the filter
leases.py             the leases of a group in a queue (in flight, returned, done), and of all groups and queues
key_limits.py         limits of leases with the same key
settling.py           acknowledgements, and other changes of leases by their receipts
lease_saver.py        the rows of the log that contain the leases, and a start with them
credit.py             how many messages a streaming consumer may hold
redelivery.py         redelivery of messages that are given back, and of those whose leases have ended
redelivery_rows.py    the rows that bring a message back to its group
retry.py              retries that RocketMQ's clients request
pull.py               reads without leases: by offset, and of new messages without a group
dead_letters.py       listing, resending and deleting dead letters
retention.py          segments that are kept for unread messages
group_places.py       the state of one message in each group
"""
