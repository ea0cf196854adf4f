"""The HTTP edge, for programs that only have an HTTP client: JSON over HTTP/1.1 (docs/http.md).

Receives: requests with their headers. A body of limited size is read after the caller has been identified.
Keeps: no state between two requests.
Hands on: batches of sends to the broker's ingress; receives, receipts, reschedules and cancels to its verbs.
"""
