"""The broker: every decision is made here, in the order in which the log gives out sequence numbers.

Receives: requests as column batches from the edges; due promises from the ticker.
Keeps: topics, queues' next offsets, consumer offsets, consumers that wait; nothing that the log could not rebuild.
Hands on: rows to the log, promises to the schedule, visible rows to consumers, verdicts to callers that cancel.
"""
