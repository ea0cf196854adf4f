"""What each path does: a request's parameters to a verb of the broker, and its result to an answer."""
