"""Processes that begin while a client is busy: `python -m … ENDPOINT KIND HOW PROCESSES`.

Threads of the parent send and consume by the client, while it starts processes, a few at a time. Each process sends and
consumes too, by the same client where the process is forked. KIND is blocking or asyncio (awaited.py). HOW:

fork                        os.fork; each tenth child ends as a worker of a web server does, which frees all objects
mp-fork, spawn, forkserver  multiprocessing's ways to start a process

Prints a line for each message that was sent or handed out: `sent ID` or `got ID`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable

from tests.client.awaited import CLIENTS

from timeball import Timeball

AT_ONCE = 4  # children that run at the same time
SENDS = 3  # of each child
TOPIC, GROUP = "forks-under-load", "g"


def say(word: str, message_id: str | None) -> None:
    """Print a line in one write, so that lines of several processes do not mix."""
    os.write(1, f"{word} {message_id}\n".encode())


def pull(ball: Timeball) -> None:
    """Pull once, print a line for each message, and acknowledge it."""
    for message in ball.pull(TOPIC, GROUP, max_messages=2, wait="50ms", lease="10m"):
        say("got", message.id)
        assert message.ack()


def work(ball: Timeball) -> None:
    """Send and consume in a child."""
    for _ in range(SENDS):
        say("sent", ball.send(TOPIC, "of a child").id)
    pull(ball)


def work_anew(endpoint: str, kind: str) -> None:
    """Send and consume in a process that has no client of the parent."""
    with CLIENTS[kind](endpoint) as ball:
        work(ball)


def fork(ball: Timeball, number: int) -> Callable[[], int]:
    """Start a child by os.fork. Returns a function that waits for its exit code. Each tenth child frees all objects."""
    if child := os.fork():
        return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        work(ball)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)
    if number % 10 == 0:
        sys.exit()
    os._exit(0)


def start(how: str, ball: Timeball, endpoint: str, kind: str) -> Callable[[], int]:
    """Start a process by multiprocessing. Returns a function that waits for its exit code."""
    if how == "mp-fork":
        process = multiprocessing.get_context("fork").Process(target=work, args=(ball,))
    else:
        process = multiprocessing.get_context(how).Process(target=work_anew, args=(endpoint, kind))  # type: ignore[assignment]
    process.start()

    def wait() -> int:
        process.join()
        return process.exitcode or 0

    return wait


def main(endpoint: str, kind: str, how: str, processes: int) -> None:
    """Send and consume while processes run, then consume the remaining messages. All processes must exit with 0."""
    ball = CLIENTS[kind](endpoint)
    ball.create_topic(TOPIC, 4)
    stop_sending, stop_receiving = threading.Event(), threading.Event()

    def send() -> None:
        while not stop_sending.wait(0.01):
            say("sent", ball.send(TOPIC, "of the parent").id)

    def consume() -> None:
        for message in ball.consume(TOPIC, GROUP, max_messages=8, lease="10m", stop=stop_receiving):
            say("got", message.id)

    def poll() -> None:
        while not stop_receiving.is_set():
            pull(ball)

    senders = [threading.Thread(target=send) for _ in range(2)]
    receivers = [threading.Thread(target=target) for target in (consume, poll)]
    for thread in senders + receivers:
        thread.start()
    running: list[Callable[[], int]] = []
    exit_codes: set[int] = set()
    for number in range(processes):
        if len(running) == AT_ONCE:
            exit_codes.add(running.pop(0)())
        running.append(fork(ball, number) if how == "fork" else start(how, ball, endpoint, kind))
    exit_codes |= {wait() for wait in running}
    stop_sending.set()
    for thread in senders:
        thread.join()
    stop_receiving.set()
    for thread in receivers:
        thread.join()
    for message in ball.consume(TOPIC, GROUP, until_idle="1s", lease="10m"):
        say("got", message.id)
    ball.close()
    assert exit_codes == {0}, exit_codes


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
