"""Builds the state of a broker from the log: at a start from the checkpoint, on a follower with each committed row."""
