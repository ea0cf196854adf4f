"""RocketMQ transactions: half messages, their commit or rollback, and checks with the producer."""
