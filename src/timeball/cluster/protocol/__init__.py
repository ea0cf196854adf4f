"""The replication protocol: pure functions from events to effects. No I/O, no clock, no threads."""
