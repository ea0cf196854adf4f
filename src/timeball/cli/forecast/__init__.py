"""`timeball forecast`: when how much falls due, and what would be late.

command    the command itself: count, add what is not there yet, answer
options    what is asked for: a window, consumers, an extra load
report     counting, and the answer as a document
render     the answer for people
picture    the answer as PNG
"""

from timeball.cli.forecast.command import forecast

__all__ = ["forecast"]
