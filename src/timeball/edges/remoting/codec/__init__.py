"""RocketMQ's byte formats: frames, headers, message records and batches. No I/O, no clock, no broker.

Input: bytes read from a connection, or column batches to be encoded.
State: the incomplete frame at the end of the bytes read.
Output: commands, columns and bytes. Malformed input is refused here, before a handler sees it.

Each module shows the layout of the format that it writes. The hot parts have two implementations, and implementation.py
selects one.
"""
