"""`timeball forecast`: show how many messages fall due when, and how many would be late.

command    the command itself: count, add an extra load, answer
options    the request: a window, consumers, an extra load
report     counting, and the answer as a document, for people, and as a picture
"""

from timeball.cli.forecast.command import forecast

__all__ = ["forecast"]
