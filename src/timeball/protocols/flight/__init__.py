"""The Arrow Flight edge: batches in, batches out, and JSON for everything small.

Receives: `send` exchanges (record batches), actions (JSON), tickets (JSON).
Keeps: one window of unanswered batches per stream, bounded in batches and bytes. Takes no message before it knows who
    calls, none longer than a batch may be, and decodes none that becomes longer than it is.
Hands on: to the broker's loop; answers travel back in the order of the requests.

    codec      JSON <-> typed requests, answers, errors; tickets; bounds    (no I/O)
    protobuf   Flight's protobuf messages                                   (no I/O)
    window     unanswered batches of a stream, in order; back-pressure
    sends      batches to the loop, and their answers back
    exchange   one stream of batches: a reading thread, an answering thread
    gate       how many calls may be inside, and how many requests on their way
    verbs      from a decoded request to the broker's verb
    server     FlightEdge: what grpcio calls
"""
