"""The edge that calls out: a subscription's messages go to its URL by HTTP POST (docs/push.md).

Receives: messages, as any consumer of a group does, each leased in the log.
Keeps: of each subscription the requests under way, how its receiver has done, and its connections.
Hands on: a request for each message; to the engine, the message as acknowledged or as an attempt that failed.
"""
