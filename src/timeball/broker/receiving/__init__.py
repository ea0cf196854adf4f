"""Receiving: a message that is handed out is a promise, and its receipt names that promise.

    receipts.py    what a consumer is given; ../receipts.py: what names it
    parking.py     rows handed out -> the promises that bring them back
    receiving.py   the verbs: receive, acknowledge, change, dead letter
    answers.py     what consumers say of what they have: settled promise by promise, in the log
    promised.py    the row of a promise, wherever it lies by now
    positions.py   after a crash: which positions the promises in the log have done with
    seal.py        the secret that receipts' texts are sealed with

A row handed out is written to the log as a PROMISE for the group's retry topic, or for its dead letters if this was
the last attempt, due when its invisible time ends; only then does the consumer see it, and the position is done. To
acknowledge is to cancel that promise. What is not acknowledged is released by the machinery that releases everything,
exactly once, whatever died in between; there is no second clock and no list of what is in hand.

Groups that consume in order have positions in hand instead (../popping/): a queue waits for its first message, and
to copy it behind the others would break the order.
"""

from timeball.broker.receiving.receipts import AnyReceipt, Receipt, Received
from timeball.broker.receiving.receiving import Receiving

__all__ = ["AnyReceipt", "Receipt", "Received", "Receiving"]
