"""RocketMQ's byte formats: frames, headers, message records and batches. No I/O, no clock, no broker.

Receives: bytes read from a connection, or column batches to be encoded.
Keeps: the incomplete frame at the end of the bytes read.
Hands on: commands, columns and bytes. Malformed input is refused here, before a handler sees it.

Each module draws the format that it writes. The hot parts have two implementations, and implementation.py selects one.
"""
