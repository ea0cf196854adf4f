"""Handlers of the calls of a RocketMQ 5 client: each reads the fields, calls the broker and returns the response."""
