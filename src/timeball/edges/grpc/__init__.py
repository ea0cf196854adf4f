"""The edge for RocketMQ 5's clients: `apache.rocketmq.v2` over gRPC (docs/protocols/grpc.md).

Receives: the calls of MessagingService with their headers, and Telemetry streams.
Keeps: the sessions of connected clients, with their settings.
Hands on: batches, receipts and cancels to the broker's verbs.
"""
