"""POP consumption: the broker hands out single messages, each for a time, and takes receipts back.

    window.py     one queue of one group: which positions are handed out, given back, done
    deadlines.py  when what is handed out comes back
    copies.py     what is written when it comes back: a copy for the retry topic, or for the dead letters
    popper.py     the verbs: pop, ack, change the invisible time
    in_flight.py  what is in hand when the broker is stopped in order
    modes.py      which groups consume by POP, as an administrator has said

A message that is handed out is invisible to the group until its receipt comes back or its time is over. What is
in hand is kept in memory; the group's stored offset is the first position nobody has done with, so that a
crash hands out again what was in hand and loses nothing. In order that a copy for the retry topic is never lost
either, it is durable before its original counts as done.

Consumers of RocketMQ 5 take from the same windows, but what they are handed is a promise at once (../receiving/).
"""
