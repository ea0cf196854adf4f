"""Cancel, reschedule and lookup of scheduled messages by id, key, number, range of numbers, or recall handle."""
