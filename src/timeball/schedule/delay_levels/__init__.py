"""`delay_levels`: one FIFO a level, as RocketMQ 4 has it; the scan is a search for now.

The queues of the topic SCHEDULE_TOPIC_XXXX are the FIFOs, and their index is all there is of them: an entry
holds the due time where others hold a tag's hash. What waits here costs no memory. A level's offset is where its
unsettled entries begin, and a release record names the promise it keeps, so that a restart repeats nothing.
"""
