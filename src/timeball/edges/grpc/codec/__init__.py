"""Conversion between protobuf messages and rows of the log: no sockets, no clock, no event loop.

Receives: messages of `apache.rocketmq.v2`, and rows of the log.
Keeps: nothing.
Hands on: rows for the broker, and messages for the client.
"""
