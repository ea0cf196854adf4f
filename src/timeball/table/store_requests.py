"""Requests to an object store that may accept connections and never answer.

The libraries give up such a request after a minute, and cannot be stopped earlier. So each request has a thread of its
own, and the caller waits for a stated time. After that the request counts as failed, and its thread is left behind. A
broker that stops waits briefly for requests under way, but not for those left behind.

A request that was left behind may still take effect, as after a lost answer. So each request is one whole step that may
be repeated: a file is put under its own name, and never a part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, TypeVar

from timeball.model.errors import Unavailable

T = TypeVar("T")

LAST_ANSWERS_S = 1.0  # wait for requests under way when the broker stops


class StoreRequests:
    """Runs requests with a time limit. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects the fields below
        self._under_way: set[Future[Any]] = set()
        self._is_closed = False

    def ask(self, call: Callable[[], T], answer_s: float | None) -> T:
        """Run a request. Returns its result, raises its error, or Unavailable after `answer_s` seconds.

        `answer_s` None: no limit, for a request that gives up by itself.
        """
        asked = Future[T]()
        with self._lock:
            if self._is_closed:
                raise _stops()
            self._under_way.add(asked)
        # No thread pool, because a pool's threads are joined when the process ends.
        threading.Thread(target=_answer, args=(asked, call), name="store-request", daemon=True).start()
        try:
            if not wait([asked], answer_s).done:
                raise Unavailable(f"no answer within {answer_s:g} s")
            return asked.result()
        finally:
            with self._lock:
                self._under_way.discard(asked)

    def close(self) -> None:
        """Refuse further requests, and leave behind those without an answer after LAST_ANSWERS_S."""
        with self._lock:
            self._is_closed = True
            left = list(self._under_way)
        for each in wait(left, LAST_ANSWERS_S).not_done:
            try:
                each.set_exception(_stops())
            except InvalidStateError:
                continue  # answered at this moment


def _answer(asked: Future[T], call: Callable[[], T]) -> None:
    try:
        try:
            asked.set_result(call())
        except InvalidStateError:
            raise
        except BaseException as error:  # of any kind: `ask` raises it
            asked.set_exception(error)
    except InvalidStateError:
        return  # left behind


def _stops() -> Unavailable:
    return Unavailable("the broker stops, and asks the object store no more")
