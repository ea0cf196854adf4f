"""The log: the only truth.

Receives: column batches in `message.LOG_SCHEMA`, in the order the broker decided them.
Keeps: frames in segments, each synced before its sender is answered; a sequence number for every row.
Hands on: rows by sequence number, range, queue position or key; caches of it are rebuilt from it.
"""
