"""Export `Timeball`, the Python client.

The client uses the HTTP API of `edges/http` for operations, and the Flight protocol of `edges/flight` for columns. It
imports only `model` and `io`, so a producer does not have to install or load the broker.

    timeball, reader, async_timeball, worker     the methods
    consumer, messages, receipts, rows           leases and the loop of `consume`, results, messages to send
    attempts, credentials, identifiers, tracing  retries, keys, ids, trace context
    http_…                                       operations: connections, calls, sends, the codec
    network, loop_network                        sockets that block, or those of an event loop
    calls, exchange, sender, outgoing, browser   columns, which need pyarrow
    django, dramatiq                             backends of these frameworks, each in its extra
"""

from timeball.client.timeball import Timeball

__all__ = ["Timeball"]
