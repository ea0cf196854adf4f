"""A cluster of several groups: one broker answers for all of them, and a group can hand its messages to others."""
