"""Handlers of a RocketMQ 5 client's calls. Each checks the request, calls the broker, and builds the response."""
