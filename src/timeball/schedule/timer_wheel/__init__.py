"""`timer_wheel`: RocketMQ 5's wheel. A ring of slots, and for each a chain in a log of who waits there.

    ring          a record a slot of `precision` milliseconds: where its chain ends
    timer log     chains of batches: (instant, number, place in the commit log) of every promise

A slot says only in which pile a promise lies: rows keep their milliseconds, and what has been opened is handed out to
the millisecond, whatever the precision. What is due beyond the ring waits in a slot within it and is *rolled* when that
is opened: written again, so that the commit log may let go of where it stood, and placed anew. The *low* slot, up
to which all is delivered, passes a slot when all of it is durable: released, cancelled, or rolled (the latch).

Memory: arrivals that are not in the files yet, and what is being rolled. All else is on disk.
"""
