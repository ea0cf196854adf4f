"""`level_cascade`: any instant by hops over a table of 32 levels, a FIFO each.

It needs no memory for what waits and no bound on how far away it is, and pays with the log: a row a hop, at most eight
for the next 24 hours, and one every twenty hours beyond.
"""
