"""The commit log: the only source of truth of the broker.

Receives: column batches in `message.LOG_SCHEMA`, in the order in which the broker decided them.
Keeps: frames in segment files, each synced before its sender is answered. Every row has a sequence number.
Hands on: rows by sequence number, range, queue position or key. All caches of rows can be rebuilt from the log.
"""
