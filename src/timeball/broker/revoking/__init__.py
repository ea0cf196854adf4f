"""Ending or moving a promise that still waits: by id, key, number, range of numbers, or recall handle."""
