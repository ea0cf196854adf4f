"""The broker makes every decision, in the order in which the log assigns sequence numbers.

Receives: requests from the edges as column batches, and scheduled messages that the ticker reports as due.
Keeps: topics, next offsets of the queues, consumer offsets, waiting consumers. All can be rebuilt from the log.
Hands on: rows to the log, scheduled messages to the schedule, visible rows to consumers, verdicts to cancel requests.
"""
