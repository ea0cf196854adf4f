"""`level_cascade`: any due time by hops over a table of 32 levels, with one FIFO each.

Pending messages take no memory, and due times have no bound. The cost is in the log: one row per hop, which is at most
eight rows for the next 24 hours, and one row every 20 hours beyond.
"""
