"""Definitions that all packages share: messages and log rows, errors, limits, settings, and the rules of valid input.

The lowest package: it imports nothing else of Timeball, and it does no I/O.
"""
