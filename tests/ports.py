"""Ports for processes that tests kill and start again on the same one."""

from __future__ import annotations

import os
import random
import socket

PORTS = (12_000, 32_000)  # Linux chooses from 32,768 on, for connections too
RUNNERS = 4  # processes of one test run, each with its part of the ports

_given: set[int] = set()  # a process that starts later has not bound its port yet


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside of the range from which the system chooses for other processes.

    So a port that its process closes and opens again is there again. A port is not given again soon, and the processes
    of a test run have different ones. Not by the seeded generator of a test, which in another run beside this one gives
    the same numbers.
    """
    chance = random.SystemRandom()
    runner = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % RUNNERS
    sockets: list[socket.socket] = []
    if len(_given) > (PORTS[1] - PORTS[0]) // RUNNERS // 2:  # those of long ago are bound, or free again
        _given.clear()
    try:
        while len(sockets) < count:
            port = chance.randrange(PORTS[0] + runner, PORTS[1], RUNNERS)
            if port in _given:
                continue
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                one.close()
            else:
                sockets.append(one)
                _given.add(port)
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
