"""`timer_wheel`: RocketMQ 5's wheel. A ring of slots (`ring.py`), with a chain of messages per slot (`timer_log.py`).

A slot only groups messages: rows keep their due time in ms. A message due beyond the ring waits in a slot within it.
When that slot is opened, the message is *rolled*: it is rewritten and placed again.
"""
