"""`level_cascade`: any instant by hops over a table of 32 levels, a FIFO each.

What remains is broken up as one reads a clock, 18:47:36 is ten hours and seven and one, forty minutes and seven,
thirty seconds and five and one; each hop waits in the FIFO of its level and is written again for the next one. All
entries of a FIFO wait equally long, so they are sorted as they come and nothing is ever merged. The last hop is
opened early, with the instant itself: what the hops were late by is put right there.

Needs no memory for what waits and no bound on how far away it is. It pays with the log: a row a hop, at most
eight for the next 24 hours, and one every twenty hours beyond.
"""
