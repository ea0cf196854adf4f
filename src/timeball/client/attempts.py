"""Attempts of a call: the nodes to try, the pauses between attempts, and the outcomes that allow another attempt.

The time limit of a call includes its retries. If no broker answers (it may be restarting), a call is tried again a few
times if it is safe to repeat: it changes nothing, or the broker recognizes the repetition. If the disk of a node has
failed, the next node is asked. Any other call is tried again only if it was not carried out: it was never sent, or the
broker answered that it does nothing at the moment (for example during a hand-over). After a lost answer the client
cannot know whether the broker carried out the call.

A call that gets no answer leaves its node: the next attempt or the next call asks the next node. If there are several
nodes, an attempt of a call that is safe to repeat gets half of the time that is left, because its node may hang. A
smaller part would give up slow nodes, and repeat calls that they carry out.

    NotSent    no broker has received the call
    NotNow     the broker has refused it, and did nothing. NotSent is one case of it
    Lost       the answer was lost: the broker may or may not have carried out the call

A program that runs beside the broker, such as the pipeline, sets `patience_s` instead. All its calls may safely be
repeated. Each call is tried again for this number of seconds, and each attempt has the whole time limit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from timeball.client.network import BLOCKING, Network
from timeball.io.clock import Clock, SystemClock
from timeball.model.errors import (
    DiskFailed,
    NotLeader,
    RequestError,
    StorageError,
    TimeballError,
    Unavailable,
    from_code,
)

# The pause before each attempt after the first. A broker restarts within seconds.
RETRY_PAUSES_S = (0.1, 0.3, 1.0)
# With several nodes: 5 s in total, because another node leads within two or three seconds.
CLUSTER_PAUSES_S = (0.05, 0.1, *4 * (0.2,), *4 * (0.5,), 1.0, 1.0)
CONNECT_S = 2.0  # longest time to connect if there are other nodes to try
PATIENT_PAUSES_S = (0.1, 2.0)  # the first and the longest pause of a client with `patience_s`

# Codes of a node whose log has stopped: another node of the cluster leads soon.
FAILED_DISK = frozenset({StorageError.code, DiskFailed.code})

T = TypeVar("T")


class NotNow(Unavailable):
    """The broker did not carry out the call, because it is stopping or handing over. The call may be repeated."""

    code = "not_now"


class NotSent(NotNow):
    """No broker has received the call: there was no connection, or the stream was already dead."""

    code = "not_sent"


class Lost(Unavailable):
    """The connection broke before the answer came, so the broker may or may not have carried out the call."""

    code = "answer_lost"


def refusal(code: str, text: str) -> TimeballError:
    """Rebuild an error from the broker's code and text.

    The code of `Unavailable` gives NotNow, because the broker did not carry out the call. After an error of a subclass
    of Unavailable, the broker may have carried it out, or may still do so.
    """
    return NotNow(text) if code == Unavailable.code else from_code(code, text)


class OpenRead:
    """A read that another thread may cancel. The broker takes back the messages that a cancelled read had leased."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancel: Callable[[], None] | None = None  # ends the read, while it waits for the broker
        self.is_cancelled = False

    @property
    def has_begun(self) -> bool:
        """True while the read waits for the broker."""
        return self._cancel is not None

    def begin(self, cancel: Callable[[], None]) -> None:
        """Begin the read, which the function `cancel` ends. Calls it at once if the read was cancelled before."""
        with self._lock:
            self._cancel = cancel
            if self.is_cancelled:
                cancel()

    def end(self) -> None:
        """End the read, so that `cancel` has no more effect on its connection."""
        with self._lock:
            self._cancel = None

    def cancel(self) -> None:
        """Cancel the read, now or when it begins. The read then raises RequestError, unless it has already ended."""
        with self._lock:
            self.is_cancelled = True
            if self._cancel is not None:
                self._cancel()


class Attempts:
    """The nodes of one broker or cluster, and the attempts of calls to them. Thread safe."""

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_ms: int,
        *,
        patience_s: float | None = None,
        clock: Clock | None = None,
        network: Network = BLOCKING,
    ) -> None:
        """Prepare calls to `endpoints`, the addresses of the nodes. `patience_s`: see the module's docstring."""
        self.network = network
        self._endpoints = tuple(endpoints)
        self._current = 0  # index of the node that the next call uses
        self.timeout_ms = timeout_ms
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        _LIVE.add(self)

    @property
    def endpoint(self) -> str:
        """The address that the next call uses."""
        return self._endpoints[self._current]

    def check(self) -> None:
        """Raise RequestError if no call can be made: the client is closed."""
        if self._closed.is_set():
            raise RequestError("this Timeball client is closed")

    def after_fork(self) -> None:
        """Forget the connections of the parent process, and replace locks that it may have held. Runs in a child."""
        closed, self._closed = self._closed.is_set(), threading.Event()
        if closed:
            self._closed.set()

    def leave(self, endpoint: str) -> None:
        """Let the next call use the next node of the cluster, because this one does not answer.

        Does nothing if another call has left the node already.
        """
        if endpoint == self.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)

    def leave_after(self, error: TimeballError, endpoint: str) -> None:
        """Leave a node if this error of a call shows that it does not answer or lead, or that its disk has failed."""
        if isinstance(error, Unavailable | NotLeader) or error.code in FAILED_DISK:
            self.leave(endpoint)

    def pauses(self) -> Iterator[tuple[float, bool]]:
        """Yield for each attempt the pause before it, in seconds, and whether another attempt may follow."""
        if self._patience_s is not None:
            yield from self._patient_pauses(self._patience_s)
            return
        pauses_s = RETRY_PAUSES_S if len(self._endpoints) == 1 else CLUSTER_PAUSES_S
        yield 0, len(pauses_s) > 0
        for number, pause_s in enumerate(pauses_s, 1):
            yield pause_s, number < len(pauses_s)

    def _patient_pauses(self, patience_s: float) -> Iterator[tuple[float, bool]]:
        """Yield as `pauses` does, for attempts that begin within `patience_s`. The pauses double up to the longest."""
        # Slow to import, and only for programs beside the broker.
        import logging
        import random

        logger, endpoint = logging.getLogger(__name__), self.endpoint
        # Not the common generator: a program may have seeded it, and forked processes would get equal numbers.
        chance = random.SystemRandom()
        give_up_ns, longest_s = self._clock.monotonic_ns() + int(patience_s * 1e9), PATIENT_PAUSES_S[0]
        may_retry, pause_s = patience_s > 0, 0.0
        while True:
            yield pause_s, may_retry
            if not may_retry:
                return
            # The endpoint of the failed attempt: the attempt may have left its node.
            logger.warning("broker not reached, trying again broker=%s retry_s=%.1f", endpoint, longest_s)
            endpoint = self.endpoint
            # The jitter spreads the reconnects of a whole Spark cluster after a restart of the broker.
            pause_s = longest_s * chance.uniform(0.5, 1.0)
            longest_s = min(2 * longest_s, PATIENT_PAUSES_S[1])
            may_retry = self._clock.monotonic_ns() + int(pause_s * 1e9) < give_up_ns

    def may_repeat(self, error: TimeballError, *, is_repeatable: bool) -> bool:
        """Check whether a call may be made again after this error. `is_repeatable`: carrying it out twice is safe."""
        if not is_repeatable:
            return isinstance(error, NotNow)
        return isinstance(error, Unavailable) or (error.code in FAILED_DISK and len(self._endpoints) > 1)

    async def pause(self, seconds: float) -> None:
        """Wait `seconds` before an attempt. Raises Unavailable if the client is closed meanwhile."""
        if seconds > 0 and await self.network.pause(seconds, self._closed):
            raise Unavailable("the client was closed")

    def attempt_limit_s(self, remaining_s: float, *, is_repeatable: bool) -> float:
        """Compute the time limit of an attempt that another one may follow: all of the remaining time, or half of it.

        The module's docstring gives the reasons.
        """
        has_others = len(self._endpoints) > 1 and self._patience_s is None
        return remaining_s / 2 if is_repeatable and has_others else remaining_s

    def connect_limit_s(self, limit_s: float) -> float:
        """Compute the time limit for the connection of an attempt, which leaves time for the other nodes."""
        nodes = len(self._endpoints)
        return limit_s if nodes == 1 else min(limit_s / nodes, CONNECT_S)

    async def with_retries(
        self,
        call: Callable[[float], Awaitable[T]],
        timeout_ms: int,
        *,
        is_repeatable: bool = True,
        wait_ms: int = 0,
    ) -> T:
        """Make attempts of a call until one succeeds. Returns its result.

        Raises the last error when the attempts or the time are used up, or if the call must not be repeated after it.

        `call` makes one attempt. It receives its time limit in seconds, and raises TimeballError. `wait_ms` is added to
        `timeout_ms`, because the broker may wait so long before it answers.
        """
        end_ns = self._clock.monotonic_ns() + (timeout_ms + wait_ms) * 1_000_000
        remaining_s = (timeout_ms + wait_ms) / 1000
        failure: TimeballError | None = None
        for pause_s, may_retry in self.pauses():
            await self.pause(pause_s)
            # With `patience_s`, each attempt has all of the time.
            if failure is not None and self._patience_s is None:
                remaining_s = (end_ns - self._clock.monotonic_ns()) / 1e9
                if remaining_s <= 0:
                    raise failure
            self.check()
            limit_s, endpoint = remaining_s, self.endpoint
            if may_retry:
                wait_s = wait_within(remaining_s, timeout_ms, wait_ms) / 1000
                limit_s = wait_s + self.attempt_limit_s(remaining_s - wait_s, is_repeatable=is_repeatable)
            try:
                return await call(limit_s)
            except TimeballError as error:
                self.leave_after(error, endpoint)
                if not (may_retry and self.may_repeat(error, is_repeatable=is_repeatable)):
                    raise
                failure = error
        raise AssertionError("unreachable: the last attempt returns or raises")


def wait_within(limit_s: float, timeout_ms: int, wait_ms: int) -> int:
    """Compute how long a broker may wait before it answers an attempt with this time limit, in milliseconds.

    This is `wait_ms`, but less in a later attempt, which must leave half of `timeout_ms` for the answer.
    """
    return min(wait_ms, max(0, int(1000 * limit_s) - timeout_ms // 2))


_LIVE: weakref.WeakSet[Attempts] = weakref.WeakSet()  # all objects of this process


def _after_fork() -> None:
    for attempts in list(_LIVE):
        attempts.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def split_endpoints(endpoint: str, schemes: Sequence[str], example: str) -> list[str]:
    """Split "grpc://a:1,b:2" into "grpc://a:1" and "grpc://b:2".

    Raises RequestError for a malformed endpoint, or for a scheme that is not in `schemes`.
    """
    scheme, separator, rest = endpoint.partition("://")
    addresses = [address.strip() for address in rest.split(",")]
    if not separator or scheme not in schemes or (len(addresses) > 1 and not all(addresses)):
        raise RequestError(f"endpoint {endpoint!r}: write it as {example}")
    return [f"{scheme}://{address}" for address in addresses]
