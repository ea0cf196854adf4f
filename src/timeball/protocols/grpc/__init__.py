"""The edge for RocketMQ 5's clients: `apache.rocketmq.v2` over gRPC (docs/protocols/grpc.md).

Receives: calls of MessagingService, each with its headers; streams of Telemetry.
Keeps: who is connected, and with which settings.
Hands on: batches, receipts and cancels to the broker's verbs.
"""
