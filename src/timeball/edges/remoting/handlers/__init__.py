"""Handlers of RocketMQ's requests. Each decodes the fields of a request, calls the broker and creates the answer."""
