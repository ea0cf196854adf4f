"""Timeball: a broker that keeps a message until its instant, and then delivers it exactly once into its queue.

    from timeball import Timeball

    with Timeball("grpc://127.0.0.1:7400") as ball:
        ball.send("orders", b"close order 17 if unpaid", after="30m")

The rooms, in the order a message meets them:

    message clock errors limits   the vocabulary; imports nothing of ours
    files config                  the disk and the settings, as arguments
    log                           decisions -> bytes that stay
    table                         promises at rest: the pending table's layout and catalogue
    inspect                       a data folder, looked at without a broker
    schedule                      bytes that wait -> due at T
    broker                        requests -> decisions
    protocols                     bytes <-> requests
    pipeline                      the log, as tables (Spark)
    client                        what a Python program imports
    node                          composition root
    cli                           one file a command
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for readers and type checkers; a program gets it from `__getattr__`
    from timeball.client import Timeball

__all__ = ["Timeball", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the client when a program asks for it: Arrow alone costs a command half of its start."""
    if name != "Timeball":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from timeball.client import Timeball

    return Timeball
