"""What a Python program imports: `Timeball`, the client.

It speaks the Flight protocol of `protocols/flight` and imports only the vocabulary (message, errors, limits,
clock), so that a producer pays for no broker.
"""

from timeball.client.timeball import Timeball

__all__ = ["Timeball"]
