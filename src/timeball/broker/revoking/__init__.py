"""Cancel, reschedule and lookup of promises by id, key, number, range of numbers, or recall handle."""
