"""The edges: each package translates one protocol (bytes of its clients) to calls of the broker.

Receives: connections from clients.
Keeps: nothing that outlives a connection. Everything that must survive goes through the broker into the log.
Hands on: typed requests and column batches to `broker`, on the broker's event loop.

In each edge, a codec and a server are separate. A codec does no I/O: it decodes bytes to typed requests, encodes
answers to bytes, and checks every limit of the wire format. A server handles connections and threads, and contains no
rule of the broker.
"""
