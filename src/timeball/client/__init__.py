"""Export `Timeball`, the Python client.

The client uses the Flight protocol of `edges/flight`. It imports only `model` and `io`, so a producer does not
have to install or load the broker.
"""

from timeball.client.timeball import Timeball

__all__ = ["Timeball"]
