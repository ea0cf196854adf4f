"""HTTP/2 with gRPC's messages, for the two gRPC edges: RocketMQ 5's clients and Arrow Flight (decision 0041).

Receives: an edge's methods, and the connections of its clients.
Keeps: windows, incomplete messages and deadlines. It does not interpret the calls.
Hands on: each request, as bytes, to the edge that has the method.

    frames       frames, and the header blocks of answers              (no I/O)
    header_blocks    the header blocks of requests                     (no I/O)
    streams      sending on one connection, and its windows
    packing      gRPC's compression of one message                     (no I/O)
    connection   the bounds of a client; bytes to streams
    calls        methods, headers, and the counts of all calls         (no I/O)
    exchange     one call: messages, compression, deadlines, statuses
    server       listens and creates a call for each new stream
"""
