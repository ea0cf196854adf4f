"""A client and a fork, in separate processes: `python -m … ENDPOINT CASE KIND`. The child prints how each call ended.

The endpoint is an HTTP address, for operations, or one of Flight, for columns. KIND is blocking or asyncio.

made      the parent creates a client and makes no call, and the child uses the client
used      the parent has used its client before the fork, and the child uses the same client and creates another
pool      like "used", but the child is started by multiprocessing with the start method "fork"
polling   like "used", but a thread of the parent waits in a pull during the fork
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable

import pyarrow as pa
from tests.client.awaited import CLIENTS

from timeball import AsyncTimeball, Timeball, Worker
from timeball.spark.endpoint import Endpoint

TIMEOUT_MS = 2_000


def calls(ball: Timeball, endpoint: str) -> dict[str, Callable[[], object]]:
    """Every call of a client over the protocol of this endpoint, by name."""
    return {**(columns if endpoint.startswith("grpc") else operations)(ball, endpoint), "close": ball.close}


def columns(ball: Timeball, endpoint: str) -> dict[str, Callable[[], object]]:
    """The calls that send or read columns over Flight. "asyncio" and the last two create clients of their own."""
    table = pa.table({"topic": ["forked"], "body": [b"x"]})
    return {
        "send_many": lambda: ball.send_many(table),
        "browse": lambda: ball.browse("forked"),
        "read_log": lambda: ball.read_log(1, 2).read_all(),
        "read_queue": lambda: ball.read_queue("forked", 0, 0, 1).read_all(),
        "reserve": lambda: ball.reserve(1),
        "compact": ball.compact,
        "asyncio": lambda: asyncio.run(ask(endpoint)),
        "a new client": lambda: Timeball(endpoint, timeout_ms=TIMEOUT_MS).reserve(1),
        "a new endpoint": lambda: Endpoint(endpoint, patience_s=1).status(),
    }


def operations(ball: Timeball, endpoint: str) -> dict[str, Callable[[], object]]:
    """The calls over HTTP. "asyncio" and "a new client" create clients of their own."""
    return {
        "status": ball.status,
        "topics": ball.topics,
        "create_topic": lambda: ball.create_topic("forked"),
        "queues": lambda: ball.queues("forked"),
        "send": lambda: ball.send("forked", "x"),
        "send_many": lambda: ball.send_many([{"topic": "forked", "body": "x"}]),
        "cancel": lambda: ball.cancel("nobody"),
        "reschedule": lambda: ball.reschedule("nobody", after="1s"),
        "pull": lambda: ball.pull("forked", "g", wait=0),
        "ack": lambda: ball.ack(ball.pull("forked", "h", wait=0)),
        "consume": lambda: list(ball.consume("forked", "i", until_idle="0.01s")),
        "offsets": lambda: ball.offsets("g", "forked"),
        "commit": lambda: ball.commit("forked", "g", {}),
        **({"worker": lambda: work(ball)} if isinstance(ball, Timeball) else {}),
        "asyncio": lambda: asyncio.run(ask(endpoint)),
        "a new client": lambda: Timeball(endpoint, timeout_ms=TIMEOUT_MS).status(),
    }


def work(ball: Timeball) -> None:
    """Run a worker until it has handled a message, or has ended by itself."""
    handled = threading.Event()
    worker = Worker(ball, "w", "forked", lambda message: handled.set())
    worker.start()
    while not handled.wait(0.02) and all(thread.is_alive() for thread in worker._threads):
        pass
    worker.stop()
    worker.join()


async def ask(endpoint: str) -> None:
    """Make a call of an asynchronous client."""
    async with AsyncTimeball(endpoint, timeout_ms=TIMEOUT_MS) as ball:
        await (ball.reserve(1) if endpoint.startswith("grpc") else ball.status())


def child(ball: Timeball, endpoint: str) -> None:
    """Make every call. Print how each ended, and whether it took too long."""
    for name, call in calls(ball, endpoint).items():
        begun = time.monotonic()
        try:
            call()
            outcome = "done"
        except Exception as error:  # this is the outcome
            outcome = f"{type(error).__name__}: {error}"
        late = "" if time.monotonic() - begun < 4 * TIMEOUT_MS / 1000 else " (too late)"
        print(f"{name}: {outcome}{late}", flush=True)


def use(ball: Timeball, endpoint: str) -> bool:
    """Send a message, so that the client has a connection. Return whether the broker has accepted it."""
    if endpoint.startswith("grpc"):
        return ball.send_many(pa.table({"topic": ["forked"], "body": [b"x"]})).rows == 1
    return ball.send("forked", "x").seq > 0


def main(endpoint: str, case: str, kind: str) -> None:
    """Fork as the case says, and print the child's exit code and whether the parent's client still works."""
    ball = CLIENTS[kind](endpoint, timeout_ms=TIMEOUT_MS)
    if case != "made":
        use(ball, endpoint)
    if case == "polling":
        read = ball.browse if endpoint.startswith("grpc") else ball.pull
        group = "" if endpoint.startswith("grpc") else "p"
        threading.Thread(
            target=lambda: [read("forked", group, wait="30s") for _ in range(2)], daemon=True
        ).start()
        use(ball, endpoint)
    if case == "pool":
        process = multiprocessing.get_context("fork").Process(target=child, args=(ball, endpoint))
        process.start()
        process.join()
        print(f"ended: {process.exitcode}", flush=True)
    elif pid := os.fork():
        _, status = os.waitpid(pid, 0)
        print(f"ended: {os.waitstatus_to_exitcode(status)}", flush=True)
    else:
        child(ball, endpoint)
        sys.exit()  # as a worker of gunicorn ends: all objects are freed
    print(f"parent: {use(ball, endpoint)}", flush=True)
    os._exit(0)  # a thread may still wait in its pull


if __name__ == "__main__":
    main(*sys.argv[1:])
