"""The edge for programs that have nothing but HTTP: JSON over HTTP/1.1 (docs/http.md).

Receives: requests, each with its headers, and a body of bounded size once it is known who calls.
Keeps: nothing between two requests.
Hands on: batches of sends to the broker's ingress; receives, receipts, moves and cancels to its verbs.
"""
