"""gRPC over HTTP/2, for the two gRPC edges: RocketMQ 5's clients and Arrow Flight (decision 0041).

Receives: an edge's methods, and the connections of its clients.
Keeps: flow-control windows, incomplete messages and deadlines. It does not interpret the calls.
Hands on: each decoded request to the edge that has the method.

    frames           encodes and decodes frames, encodes the header blocks of answers     (no I/O)
    streams          the sending side of one connection: streams and their windows
    connection       the receiving side of one connection: the bounds for its client, the header blocks of requests
    exchange         one call: messages, compression, deadlines, statuses. Methods, and the limits that all calls of an
                     edge share
    server           listens, and creates a call for each new stream
"""
