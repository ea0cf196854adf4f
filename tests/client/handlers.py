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
    """Ends its process with the body "poison", and takes a moment for any other."""

    def __call__(self, message: Message) -> None:
        if message.body == b"poison":
            os._exit(9)
        super().__call__(message)


class Idle:
    """A worker without work."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def run(self) -> None:
        self._stopping.wait()

    def stop(self) -> None:
        self._stopping.set()


class Broken(Idle):
    """One that fails at once."""

    def run(self) -> None:
        raise ValueError("a fault on purpose")
