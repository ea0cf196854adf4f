"""The edges: bytes of a protocol on one side, the broker's verbs on the other.

Receives: connections from clients. Each edge is a package (flight: Arrow Flight).
Keeps: nothing that outlives a connection. Everything that must survive goes through the broker into the log.
Hands on: typed requests and column batches to `broker`, on the broker's event loop.

A codec does no I/O. It decodes bytes to typed requests, encodes answers to bytes, and checks every bound of the wire
format. A server handles connections and threads, and contains no rule of the broker.
"""
