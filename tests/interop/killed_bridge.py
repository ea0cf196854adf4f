"""`timeball kafka` that kills itself (SIGKILL) at the n-th time of a step, or that breaks a rule on purpose.

python killed_bridge.py STEP N --in … : the further arguments are those of the command
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from timeball.cli.main import main
from timeball.client.exchange import SendExchange, Source
from timeball.edges.kafka import delivery
from timeball.edges.kafka.options import BridgeQueue

STEPS: dict[str, tuple[Any, str, bool]] = {
    # Step: a class, its method, and whether the process is killed after the method instead of before it.
    "cancelled, before the batch is sent": (BridgeQueue, "cancel", True),
    "before a batch is sent": (Source, "send", False),
    "sent, before the answer": (SendExchange, "submit", True),
    "answered, before Kafka is told": (Source, "send", True),
    "pulled, before a transaction": (delivery.Delivery, "_deliver", False),
    "written, before the commit": (delivery.Delivery, "_commit", False),
    "committed": (delivery.Delivery, "_commit", True),
}
OUTSIDE = "the position in a transaction of its own"


def die(times: list[int]) -> None:
    """Decrease the only number in `times`, and kill the process when it is zero."""
    times[0] -= 1
    if times[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(method: Callable[..., Any], times: list[int], *, after: bool) -> Callable[..., Any]:
    """Return a method that calls `method`, and kills the process before or after the n-th call (n is in `times`)."""

    def run(*args: Any, **options: Any) -> Any:
        if not after:
            die(times)
        result = method(*args, **options)
        if after:
            die(times)
        return result

    return run


def write_outside(times: list[int]) -> Callable[..., None]:
    """Return a wrong `_write`: it commits the records first, and then their position in a second transaction."""
    right_write = delivery.Delivery._write

    def write(self: Any, found: list[Any], position: int, stop: Any) -> None:
        right_write(self, found, self._offset, stop)
        if found:
            die(times)
        right_write(self, [], position, stop)

    return write


if __name__ == "__main__":
    step, times = sys.argv[1], [int(sys.argv[2])]
    if step == OUTSIDE:
        delivery.Delivery._write = write_outside(times)  # type: ignore[method-assign]
    else:
        owner, name, after = STEPS[step]
        setattr(owner, name, kill_at(getattr(owner, name), times, after=after))
    main(["kafka", *sys.argv[3:]])
