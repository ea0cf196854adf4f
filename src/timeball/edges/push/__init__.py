"""The push edge: it sends a subscription's messages to the URL of their receiver by HTTP POST (docs/push.md).

Receives: messages, like any consumer of a group, each with a lease.
Keeps: per subscription, the requests under way, the receiver's successes and failures, and its connections.
Hands on: a request for each message to the receiver, and its outcome to the engine, as an acknowledgement or a
    failed attempt.
"""
