"""The Arrow Flight edge: batches in, batches out, and JSON for everything small.

Receives: `send` exchanges (record batches), actions (JSON), tickets (JSON).
Keeps: one window of unanswered batches per stream, bounded in batches and bytes. Takes no message before it knows who
    calls, none longer than a batch may be, and decodes none that becomes longer than it is.
Hands on: to the broker's verbs; answers travel back in the order of the requests.

    codec      JSON <-> typed requests, answers, errors; tickets; bounds    (no I/O)
    protobuf   Flight's protobuf messages                                   (no I/O)
    window     unanswered batches of a stream, in order; back-pressure
    sends      batches to the broker's batcher, and their answers back
    gate       how many calls may be inside
    calls      one call: who makes it, its place, its status
    exchange   one stream of batches
    reads      the rows that a ticket asks for, as far as the client takes them
    verbs      from a decoded request to the broker's verb
    server     FlightEdge: the methods, and the server of http2/
"""
