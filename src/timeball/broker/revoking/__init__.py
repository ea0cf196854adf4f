"""Cancel, reschedule and lookup of scheduled messages by id, key, number, range or recall handle, and unique keys."""
