"""Recurring schedules: rules, and the rows that continue a schedule in the frame that ends an occurrence.

Input: a rule, and the numbers of scheduled messages that end. State: caches of parsed rules and computed times (the
progress of each schedule is in registry/schedules.py). Output: the times of occurrences, and rows of the log.
"""
