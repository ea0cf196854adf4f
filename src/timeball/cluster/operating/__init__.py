"""Operation of a cluster: its state, changes by operators, and questions to other groups."""
