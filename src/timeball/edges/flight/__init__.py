"""The Arrow Flight edge: record batches in and out, and JSON for small requests and answers.

Receives: `send` exchanges (record batches), actions (JSON), tickets (JSON).
Keeps: one window of unanswered batches per stream, bounded in batches and bytes. The edge receives no message before it
    has checked the caller, none longer than a batch may be, and decodes none that would become longer than it is.
Hands on: requests to the broker's verbs. Answers travel back in the order of the requests.

    codec      JSON <-> typed requests, answers, errors, tickets; Flight's protobuf messages; bounds    (no I/O)
    exchange   one call: its caller, its slot in the limit, its status. A stream of batches: the batches to the broker,
               their answers back, and the window of unanswered batches (back-pressure)
    verbs      from a decoded request to the broker's verb
    server     FlightEdge: the methods, and the server of http2/. Reads: the rows of a ticket, as far as the client
               takes them
"""
