"""The guests of the benchmark `beside`, each a process: `python -m benchmarks.beside_guests KIND HTTP COUNT`.

polls     connections that wait for a message, a minute at a time, until the process is ended
tails     connections that read the live tail of an idle topic, until the process is ended
raw       requests with damaged bytes, 64 at a time
document  requests made from the OpenAPI document, an equal share for each operation
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.edges.http import fuzzing

from benchmarks.beside import READY

GROUPS, RAW_AT_ONCE = 100, 64
# So many dial at a time: a listener's backlog is bounded.
DIALING = 64


def main(kind: str, address: str, count: int) -> int:
    """Return the exit code: 0, or 1 for a fault of the broker's that the requests have found."""
    os.nice(10)
    host, _, port = address.rpartition(":")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    match kind:
        case "polls":
            asyncio.run(
                _hold(host, int(port), count, lambda at: f"messages?group=idle-{at % GROUPS}&wait=60s")
            )
        case "tails":
            asyncio.run(_hold(host, int(port), count, lambda at: "events"))
        case "raw":
            # Many at a time: what is left of a damaged request never comes, so most are waited for.
            with ThreadPoolExecutor(RAW_AT_ONCE) as pool:
                found = pool.map(lambda seed: fuzzing.status(int(port), random.Random(seed)), range(count))
                return int(any(status[:1] == b"5" for status in found))
        case "document":
            for label in fuzzing.LABELS:
                fuzzing.attack(int(port), label, -(-count // len(fuzzing.LABELS)))
    return 0


async def _hold(host: str, port: int, count: int, path: Callable[[int], str]) -> None:
    """Open so many connections, ask on each, say so, and read what comes; one that is answered asks again."""
    dialing = asyncio.Semaphore(DIALING)
    left, asked = count, asyncio.Event()

    async def hold(at: int) -> None:
        nonlocal left
        request = f"GET /v1/topics/idle/{path(at)} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
        async with dialing:
            reader, writer = await asyncio.open_connection(host, port, limit=4_096)
            writer.write(request)
            await writer.drain()
        left -= 1
        if not left:
            asked.set()
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"content-length: " not in head:
                await reader.read()  # a live tail: until the process is ended
                raise ConnectionError("the broker has ended a live tail")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0]))
            writer.write(request)

    async with asyncio.TaskGroup() as group:
        for at in range(count):
            group.create_task(hold(at))
        await asked.wait()
        sys.stdout.write(READY)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
