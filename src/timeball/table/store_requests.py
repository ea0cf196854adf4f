"""Requests to an object store that may take connections and never answer.

The libraries give such a request up after a minute, by themselves and no earlier. So each has a thread of its own,
and the one that asks waits for a stated time: then the request counts as failed, and its thread is left behind. A
broker that stops waits a moment for requests under way, and not for these.

A request that was left behind may still be done, as after an answer that was lost. So it is one whole step that may be
repeated: a file is put under its own name, and never half of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, TypeVar

from timeball.errors import Unavailable

T = TypeVar("T")

LAST_ANSWERS_S = 1.0  # for requests that are under way when the broker stops


class StoreRequests:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over the fields below
        self._under_way: set[Future[Any]] = set()
        self._is_closed = False

    def ask(self, call: Callable[[], T], answer_s: float | None) -> T:
        """Return what a request returns; raise what it raises, Unavailable without an answer.

        `answer_s` None: for what gives up by itself.
        """
        asked = Future[T]()
        with self._lock:
            if self._is_closed:
                raise _stops()
            self._under_way.add(asked)
        # No pool: its threads would be waited for when the process ends.
        threading.Thread(target=_answer, args=(asked, call), name="store-request", daemon=True).start()
        try:
            if not wait([asked], answer_s).done:
                raise Unavailable(f"no answer within {answer_s:g} s")
            return asked.result()
        finally:
            with self._lock:
                self._under_way.discard(asked)

    def close(self) -> None:
        """Refuse further requests, and leave behind those that have no answer after LAST_ANSWERS_S."""
        with self._lock:
            self._is_closed = True
            left = list(self._under_way)
        for each in wait(left, LAST_ANSWERS_S).not_done:
            try:
                each.set_exception(_stops())
            except InvalidStateError:
                continue  # answered in this moment


def _answer(asked: Future[T], call: Callable[[], T]) -> None:
    try:
        try:
            asked.set_result(call())
        except InvalidStateError:
            raise
        except BaseException as error:  # of any kind: it is raised where it was asked
            asked.set_exception(error)
    except InvalidStateError:
        return  # left behind


def _stops() -> Unavailable:
    return Unavailable("the broker stops, and asks the object store no more")
