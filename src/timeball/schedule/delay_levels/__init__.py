"""`delay_levels`: one FIFO per level, as in RocketMQ 4. A search replaces RocketMQ's scan.

The queues of the topic SCHEDULE_TOPIC_XXXX are the FIFOs. They exist only as their index, where an entry contains the
due time in place of a tag's hash. Pending messages take no memory here. The offset of a level is the position of its
first entry that is not settled (released or cancelled). A release record refers to the scheduled message that it
settles, so a restart repeats no release.
"""
