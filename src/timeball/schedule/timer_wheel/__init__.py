"""`timer_wheel`: RocketMQ 5's wheel. A ring of slots (`ring.py`), and for each a chain of promises (`timer_log.py`).

A slot says only in which pile a promise lies: rows keep their milliseconds, and are handed out to the millisecond,
whatever the precision. What is due beyond the ring waits in a slot within it and is *rolled*, which is written again
and placed anew, when that slot is opened. Memory holds what is not in the files yet, and what is being rolled.
"""
