"""RocketMQ's bytes and nothing else: frames, headers, message records, batches. No I/O, no clock, no broker.

Receives: bytes as they were read from a connection, or column batches that are to become bytes.
Keeps: the half frame at the end of the bytes read.
Hands on: commands, columns and bytes; malformed ones are refused here, before any handler sees them.

Each format is drawn in the module that writes it. What is hot exists twice: implementation.py says which one runs.
"""
