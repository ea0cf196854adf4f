"""kill -9 of a broker while clients send over HTTP with `retry=True`: each message is there once."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from pathlib import Path

from tests.bounds import BOUND_S
from tests.cli.processes import Running
from tests.client.awaited import Dial
from tests.ports import free_ports

from timeball import Unavailable

BOTH_CLIENTS = True


KILLS, THREADS = 3, 4


def serve(data: Path, port: int) -> Running:
    """Start a broker whose HTTP port is `port`, and wait until it is ready."""
    server = Running("serve", "--json", "--port", "0", "--data", str(data), TIMEBALL_HTTP_PORT=str(port))
    server.wait_line(event="ready")
    return server


def test_sends_repeated_by_their_ids_through_kills_are_stored_once(tmp_path: Path, dial: Dial) -> None:
    (port,) = free_ports(1)
    server, stopping, errors = serve(tmp_path / "data", port), threading.Event(), list[BaseException]()
    sent: list[str] = []
    progress = threading.Semaphore(0)  # one release for each message that was accepted, or for an error

    def send(number: int) -> None:
        """Send numbered messages. Repeat each by its id until the broker has returned a receipt."""
        try:
            with dial(f"http://127.0.0.1:{port}") as ball:
                count = 0
                while not stopping.is_set():
                    message_id = f"{number}-{count}"
                    try:
                        ball.send("killed", message_id, message_id=message_id, retry=True)
                    except Unavailable:
                        continue  # all attempts of this call failed: send the same message again
                    sent.append(message_id)
                    count += 1
                    progress.release()
        except BaseException as error:  # the test fails on it below
            errors.append(error)
            progress.release()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(KILLS):
            for _ in range(50):
                assert progress.acquire(timeout=BOUND_S) and not errors
            server.end(signal.SIGKILL)
            server = serve(tmp_path / "data", port)
        for _ in range(50):
            assert progress.acquire(timeout=BOUND_S) and not errors
        stopping.set()
        for thread in threads:
            thread.join(BOUND_S)
        with dial(f"http://127.0.0.1:{port}") as ball:
            stored = Counter(
                message.body.decode() for message in ball.consume("killed", "g", until_idle="1s")
            )
        assert stored == Counter(sent)
    finally:
        stopping.set()
        server.end()
