"""The push edge: it sends the messages of a subscription to the URL of its receiver by HTTP POST (docs/push.md).

Receives: messages, like any consumer of a group, each with a lease.
Keeps: per subscription, the requests under way, the receiver's successes and failures, and its connections.
Hands on: a request for each message to the receiver, and its outcome to the broker, as an acknowledgement or a failed
    attempt.
"""
