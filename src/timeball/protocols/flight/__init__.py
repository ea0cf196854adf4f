"""The Arrow Flight edge: batches in, batches out, and JSON for everything small.

Receives: `send` exchanges (record batches), actions (JSON), tickets (JSON).
Keeps: one window of unanswered batches per stream, bounded in batches and bytes. Takes no message before it knows who
    calls, none longer than a batch may be, and decodes none that becomes longer than it is.
Hands on: to the broker's loop; answers travel back in the order of the requests.

    codec      JSON <-> typed requests and answers; tickets; bounds         (no I/O)
    wire       Flight's protobuf messages                                   (no I/O)
    ipc        Arrow's messages: refused by their headers, or decoded       (no I/O)
    columns    which Arrow columns a send may have, and their types         (no I/O)
    failures   our errors <-> Flight errors; nothing else leaks
    window     unanswered batches of a stream, in order; back-pressure
    inbox      batches to the loop, small ones together, and their answers back
    exchange   one send stream: a reading thread, an answering thread
    gate       how many calls may be inside at once
    reading    the one message of a request: how many at once, for how long
    verbs      from a decoded request to the broker's verb
    server     FlightEdge: what grpcio calls
"""
