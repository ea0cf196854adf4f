"""The HTTP edge, for programs that only have an HTTP client: JSON over HTTP/1.1 (docs/http.md).

Receives: requests with their headers. A body of bounded size is read once the caller is known.
Keeps: no state between two requests.
Hands on: batches of sends to the broker's ingress; receives, receipts, reschedules and cancels to its verbs.
"""
