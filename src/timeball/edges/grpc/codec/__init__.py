"""Conversion between protobuf messages and columns: no sockets, no clock, no event loop.

Receives: messages of `apache.rocketmq.v2`, and rows of the log.
Keeps: nothing.
Hands on: columns for the broker, and messages for the client.
"""
