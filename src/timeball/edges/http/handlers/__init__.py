"""The handlers of the paths: each calls a verb of the broker with the request's parameters and encodes the result."""
