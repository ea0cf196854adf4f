"""Ports for processes that tests kill and start again on the same one."""

from __future__ import annotations

import random
import socket

PORTS = (12_000, 32_000)  # Linux chooses from 32,768 on, for connections too


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside of the range from which the system chooses for other processes.

    So a port that its process closes and opens again is there again. Not by the seeded generator of a test, which in
    another run beside this one gives the same numbers.
    """
    chance = random.SystemRandom()
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", chance.randrange(*PORTS)))
            except OSError:
                one.close()
            else:
                sockets.append(one)
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
