"""HTTP/2 with gRPC's messages, for the edges that are gRPC: RocketMQ 5's clients, and Arrow Flight (decision 0041).

Receives: an edge's methods, and the connections of its clients.
Keeps: windows, half messages, deadlines; nothing of what a call means.
Hands on: each request, as bytes, to the edge that has the method.

    frames       the bytes: frames, and the header blocks of answers      (no I/O)
    header_blocks    those of requests                                 (no I/O)
    streams      what leaves on one connection, and its windows
    packing      gRPC's compression of one message                        (no I/O)
    connection   what a client may do; bytes to streams
    calls        methods, headers, and what all calls share               (no I/O)
    exchange     one call: messages, compression, deadlines, statuses
    server       listens, makes a call of each new stream
"""
