"""Tasks for the tests of the backend."""

import asyncio
import os
import threading
from typing import Any

from timeball import Dead, Retry
from timeball.client.django.tasks_api import task_backends

try:
    from django.tasks import task
except ModuleNotFoundError:
    from django_tasks import task

RUNS: list[Any] = []
HOLDING, MAY_END = threading.Event(), threading.Event()


@task
def note(*args: Any, **kwargs: Any) -> list[Any]:
    """Note the arguments, and return them."""
    RUNS.append((*args, kwargs))
    return [*args]


@task
async def note_async(word: str) -> str:
    RUNS.append(word)
    return word.upper()


@task(takes_context=True)
def fail(context: Any, failures: int) -> int:
    """Fail in the first `failures` attempts."""
    if context.attempt <= failures:
        raise ValueError(f"attempt {context.attempt}")
    attempt: int = context.attempt
    return attempt


@task
def give_up() -> None:
    raise Dead("no such order")


@task
def note_set(word: str) -> set[str]:
    """Return a value that is not JSON."""
    RUNS.append(word)
    return {word}


@task
def leave(name: str) -> None:
    """Raise an exception that is no Exception."""
    raise {"SystemExit": SystemExit, "CancelledError": asyncio.CancelledError}[name]


@task
def ask_again() -> None:
    raise Retry("1h")


@task
def hold() -> None:
    """Run until the test lets it end."""
    HOLDING.set()
    MAY_END.wait()


@task
def forward(topic: str, word: str) -> None:
    """Send a message, by which a test sees that the task has run in another process."""
    task_backends["default"].ball.send(topic, word)


@task
def begin_and_end(topic: str) -> None:
    """Send "begun", wait until the test sends a message to `TOPIC-go`, and send "ended"."""
    ball = task_backends["default"].ball
    ball.send(topic, "begun")
    while not ball.pull(f"{topic}-go", "go", wait="10s"):
        pass
    ball.send(topic, "ended")


@task
def forward_or_die(topic: str, word: str) -> None:
    """Send a message. At every tenth word end the process instead, unless an earlier attempt has done so."""
    ball = task_backends["default"].ball
    # The message with the id of the word is created by the first attempt only, and so tells it from later ones.
    if (
        int(word) % 10 == 0
        and ball.send(f"{topic}-dying", word, message_id=word, retry=True).outcome == "created"
    ):
        os._exit(9)
    ball.send(topic, word)


def no_task(*args: Any) -> None:
    """A function of this module that is no task: a worker must not run it."""
    RUNS.append(("not a task", args))
