"""The edges: bytes of some protocol on one side, the broker's verbs on the other.

Receives: connections from clients; each edge is a room of its own (flight: Arrow Flight).
Keeps: nothing that outlives a connection. What must survive goes through the broker into the log.
Hands on: typed requests and column batches to `broker`, on the broker's event loop.

A codec does no I/O: it turns bytes into typed requests and answers into bytes, and is where every bound of the
wire is checked. A server moves bytes and threads, and knows no rule of the broker's.
"""
