"""The Arrow Flight edge: record batches in and out, and JSON for small requests and answers.

Receives: exchanges of record batches (`send`, `source`, `release`), actions (JSON), tickets (JSON).
Keeps: one window of unanswered batches per stream, with a limit of batches and bytes. The edge checks the caller before
    it receives a message, receives no message that is longer than a batch may be, and decodes none that would become
    longer by the decoding.
Hands on: requests to the methods of the broker. Answers are sent in the order of the requests.

    codec      JSON to typed requests and back, Flight's protobuf messages, limits. No I/O
    exchange   one call: its caller, its slot in the limit, its status. A stream of batches: the batches to the broker,
               their answers back, and the window of unanswered batches (back-pressure)
    verbs      calls the broker's method for a decoded request
    server     FlightEdge: the methods of Flight, and the server of http2/. Reads: the rows of a ticket, as fast as the
               client reads them
"""
