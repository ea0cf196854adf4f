"""Handlers that can be sent to another process."""

import os
import threading

from timeball import Message, Timeball


class Forward:
    """Sends each message on to another topic."""

    def __init__(self, ball: Timeball, topic: str) -> None:
        self._ball, self._topic = ball, topic

    def __call__(self, message: Message) -> None:
        self._ball.send(self._topic, message.body)


class Poisoned(Forward):
    """Ends its process at the body "poison", and forwards any other message."""

    def __call__(self, message: Message) -> None:
        if message.body == b"poison":
            os._exit(9)
        super().__call__(message)


class Idle:
    """A worker that only waits until it is stopped."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def run(self) -> None:
        self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


class Broken(Idle):
    """A worker whose process fails at once."""

    def run(self) -> None:
        raise ValueError("a fault on purpose")
