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
    # step: what, its verb, and whether it is killed behind it
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
    times[0] -= 1
    if times[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(verb: Callable[..., Any], times: list[int], *, behind: bool) -> Callable[..., Any]:
    def run(*given: Any, **more: Any) -> Any:
        if not behind:
            die(times)
        result = verb(*given, **more)
        if behind:
            die(times)
        return result

    return run


def outside(times: list[int]) -> Callable[..., None]:
    """Return a `_write` that commits the records first, and the position behind them."""
    whole = delivery.Delivery._write

    def write(self: Any, found: list[Any], position: int, stop: Any) -> None:
        whole(self, found, self._offset, stop)
        if found:
            die(times)
        whole(self, [], position, stop)

    return write


if __name__ == "__main__":
    step, times = sys.argv[1], [int(sys.argv[2])]
    if step == OUTSIDE:
        delivery.Delivery._write = outside(times)  # type: ignore[method-assign]
    else:
        owner, name, behind = STEPS[step]
        setattr(owner, name, killed(getattr(owner, name), times, behind=behind))
    main(["kafka", *sys.argv[3:]])
