"""`timer_wheel`: RocketMQ 5's wheel. A ring of slots (`ring.py`), and for each a chain of promises (`timer_log.py`).

A slot says only in which pile a promise lies: rows keep their milliseconds. A promise due beyond the ring waits in a
slot within it and is *rolled* (written again and placed anew) when that slot is opened.
"""
