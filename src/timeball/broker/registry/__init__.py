"""The registry of topics, groups, offsets and other rarely changed state, stored as META rows of the log."""
