"""Ports for processes that tests kill and start again on the same one."""

from __future__ import annotations

import os
import random
import socket

PORTS = (12_000, 32_000)  # Linux chooses from 32,768 on, for connections too
RUNNERS = 4  # processes of one test run, each with its part of the ports

_returned: set[int] = set()  # a process that starts later has not bound its port yet


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside of the range from which the system chooses for other processes.

    So a process can open its port again after it closed it. A port is not returned again soon, and the processes
    of a test run have different ones. They are not drawn by a test's seeded generator, which gives the same numbers in
    another run beside this one.
    """
    chance = random.SystemRandom()
    runner = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % RUNNERS
    sockets: list[socket.socket] = []
    if len(_returned) > (PORTS[1] - PORTS[0]) // RUNNERS // 2:  # the oldest are bound or free by now
        _returned.clear()
    try:
        while len(sockets) < count:
            port = chance.randrange(PORTS[0] + runner, PORTS[1], RUNNERS)
            if port in _returned:
                continue
            candidate = socket.socket()
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                candidate.close()
            else:
                sockets.append(candidate)
                _returned.add(port)
        return [int(bound.getsockname()[1]) for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()
