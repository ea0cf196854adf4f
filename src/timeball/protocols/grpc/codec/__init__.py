"""Between protobuf's messages and columns: no sockets, no clock, no event loop.

Receives: messages of `apache.rocketmq.v2`; rows of the log.
Keeps: nothing.
Hands on: columns for the broker; messages for the client.
"""
