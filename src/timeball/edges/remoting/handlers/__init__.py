"""Handlers of RocketMQ's requests: each reads the fields, calls the broker and returns the answer."""
