"""The edge for RocketMQ 5's clients: `apache.rocketmq.v2` over gRPC (docs/protocols/grpc.md).

Receives: calls of MessagingService, each with its headers, and streams of Telemetry.
Keeps: connected clients and their settings.
Hands on: batches, receipts and cancels to the broker's verbs.
"""
