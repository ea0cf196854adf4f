"""AwaitedTimeball: an AsyncTimeball with the blocking methods of Timeball, so that one test suite runs over both.

Each call is awaited in the event loop of a thread. A child process after a fork has a thread and a loop of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from timeball import AsyncMessage, AsyncTimeball, Timeball

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the event loop of this process, which a thread runs, and return its result."""
    loop = _loops.get(os.getpid())
    if loop is None:
        loop = _loops[os.getpid()] = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="awaited", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


class Awaited:
    """An object whose coroutine methods block until their result is there. Other attributes pass through unchanged."""

    def __init__(self, awaitable: Any) -> None:
        self._awaitable = awaitable

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object. A coroutine method becomes a blocking one."""
        attribute = getattr(self._awaitable, name)
        if inspect.iscoroutinefunction(attribute):
            return lambda *args, **kwargs: wrapped(awaited(attribute(*_bare(args), **kwargs)))
        return attribute


def wrapped(result: Any) -> Any:
    """Wrap received messages, also in a list, so that their answers block. Any other result is returned as it is."""
    if isinstance(result, AsyncMessage):
        return AwaitedMessage(result)
    if isinstance(result, list):
        return [wrapped(each) for each in result]
    return result


def _bare(args: Iterable[Any]) -> list[Any]:
    """The arguments of a call, with the asynchronous object itself for each wrapped object, also within lists."""
    return [
        argument._awaitable
        if isinstance(argument, Awaited)
        else _bare(argument)
        if isinstance(argument, list) and argument and isinstance(argument[0], Awaited)
        else argument
        for argument in args
    ]


class AwaitedMessage(Awaited):
    """An AsyncMessage with blocking answers."""


class AwaitedTimeball(Awaited):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(AsyncTimeball(*args, **kwargs))

    @property
    def schedules(self) -> Awaited:
        return Awaited(self._awaitable.schedules)

    def consume(self, *args: Any, **kwargs: Any) -> Iterator[AwaitedMessage]:
        return self._iterate(self._awaitable.consume, args, kwargs)

    def read_log(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the log as one reader, as Timeball returns it. The first batch names the schema."""
        import pyarrow as pa

        first, *more = self._iterate(self._awaitable.read_log, args, kwargs)
        return pa.RecordBatchReader.from_batches(first.schema, [first, *more])

    def _iterate(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
        results = method(*args, **kwargs)
        # Each step is awaited in the loop. The generator is closed in it as well, when the caller leaves its own loop.
        try:
            while True:
                try:
                    yield wrapped(awaited(anext(results)))
                except StopAsyncIteration:
                    return
        finally:
            awaited(results.aclose())

    def __enter__(self) -> AwaitedTimeball:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Dial = Callable[..., Timeball]  # the class of a client
CLIENTS: dict[str, Dial] = {"blocking": Timeball, "asyncio": AwaitedTimeball}  # type: ignore[dict-item]
