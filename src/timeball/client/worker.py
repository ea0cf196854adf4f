"""Worker: runs a handler for each message of a topic, in threads or in processes, until it is stopped.

    def close_if_unpaid(message: Message) -> None: ...

    Worker(ball, "billing", "orders", close_if_unpaid, threads=4).run()

The outcome of the handler is the answer to the group:

    returns                 the message is acknowledged
    raises Retry(after)     the attempt failed, and the message is delivered again after this delay
    raises Dead             the message goes to the group's dead letters at once
    raises anything else    the message is delivered again by the group's retry policy, and the error is logged

The next delivery and the dead letter contain the type and the text of the exception as the reason. After `raise Retry
from error` the reason is `error`.

A message is pulled only when a thread is free to handle it. The broker counts a lease that ends without an answer as an
attempt, and a process that dies gives no answer. So the only attempts that a dying process adds are those of messages
whose handlers were running, and no message goes to the dead letters before a handler has seen it.

While a handler runs, the lease of its message is renewed, so a handler may take as long as it needs. One thread pulls.
Another one acknowledges and renews. Acknowledgements that arrive during a call are sent together in the next one.

`stop`, or SIGTERM or SIGINT during `run`, ends the worker in order. It pulls no more messages. Messages that wait for a
thread are given back at once, and no attempt is counted. Running handlers finish, and their outcomes are answered.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType, TracebackType
from typing import Protocol

import msgspec

from timeball.client.calls import OpenRead
from timeball.client.consumer import Start, wanted
from timeball.client.messages import Message, reason_of
from timeball.client.timeball import Timeball
from timeball.client.tracing import processing
from timeball.model import limits
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable
from timeball.model.time_parsing import After, delay_ms

# Processes that each run a worker. They are spawned, replaced when they die, and ended in order by SIGTERM.
#
# They are spawned and not forked, because gRPC does not survive a fork (dialing.py). So the worker is pickled, and its
# handler must be importable in the process. Messages that a process had leased when it died are delivered again, to any
# member, when their leases end. A process whose parent has died stops by itself.

PAUSE_S = 1.0  # before a dead process is replaced: one that cannot start must not keep a core busy
_LOOK_S = 0.5


class Runs(Protocol):
    """The methods of a worker that its process calls."""

    def run(self) -> None:
        """Work until stopped by `stop` or by a signal."""

    def stop(self) -> None:
        """Ask the worker to end in order."""


class Processes:
    """`count` processes, each of which runs the worker that `make` returns."""

    def __init__(self, count: int, make: Callable[[], Runs]) -> None:
        try:
            ForkingPickler.dumps(
                make
            )  # a trial of the pickling by spawn, where an error would end only the keeper thread
        except Exception as error:  # of any kind: pickling a handler's parts may raise any error
            raise RequestError(
                f"this handler cannot be sent to another process ({error}): name a function at the top of a module"
            ) from error
        self._count, self._make = count, make
        self._spawn = multiprocessing.get_context("spawn")
        self._stopping = threading.Event()
        self._processes: list[SpawnProcess] = []
        self._changing = threading.Lock()
        self._keeper: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the live processes."""
        with self._changing:
            return [one.pid for one in self._processes if one.pid is not None and one.is_alive()]

    def start(self) -> None:
        """Spawn the processes, and replace each one that dies."""
        if self._keeper is not None:
            raise RequestError("this Worker was started before; make another one")
        for _ in range(self._count):
            self._add()
        self._keeper = threading.Thread(target=self._keep, name="timeball-worker-processes", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        """Ask each process to end in order."""
        with self._changing:  # no process is added after this
            self._stopping.set()
            for one in self._processes:
                one.terminate()

    def join(self) -> None:
        """Wait until all processes have ended."""
        while self._keeper is not None and self._keeper.is_alive():
            # with a time limit, because the main thread runs signal handlers between two calls
            self._keeper.join(1.0)

    def _add(self) -> None:
        with self._changing:
            if not self._stopping.is_set():
                one = self._spawn.Process(target=_run, args=(self._make,), name="timeball-worker")
                one.start()
                self._processes.append(one)

    def _keep(self) -> None:
        while self._processes:
            wait([one.sentinel for one in self._processes], _LOOK_S)
            ended = [one for one in self._processes if not one.is_alive()]
            with self._changing:
                self._processes = [one for one in self._processes if one not in ended]
            for one in ended:
                one.join()
                if not self._stopping.is_set():
                    logger.error(
                        "worker process ended, starting another pid=%s exit=%s", one.pid, one.exitcode
                    )
            if ended and not self._stopping.wait(PAUSE_S):
                for _ in ended:
                    self._add()


def _run(make: Callable[[], Runs]) -> None:
    """Run a worker in this process until it is stopped or the parent process has died."""
    worker, parent = make(), multiprocessing.parent_process()

    def follow() -> None:
        assert parent is not None
        wait([parent.sentinel])
        worker.stop()

    threading.Thread(target=follow, name="timeball-worker-parent", daemon=True).start()
    worker.run()


logger = logging.getLogger(__name__)

PULL_WAIT = "10s"  # of one long poll
RETRY_PAUSE_S = 1.0  # after a call that no broker answered

Handler = Callable[[Message], object]


class Retry(Exception):
    """Raised by a handler: the attempt failed, and the message is delivered again `after` this delay.

    Without `after`, the delay is that of the group's retry policy.
    """

    def __init__(self, after: After | None = None) -> None:
        super().__init__(after)
        self.after_ms = None if after is None else delay_ms(after)


class Dead(Exception):
    """Raised by a handler: no further attempt can help, so the message goes to the group's dead letters."""


class WorkerCounts(msgspec.Struct):
    """Outcomes since the start.

    `late` messages were acknowledged after their lease had ended, so they are delivered again.
    """

    acknowledged: int = 0
    retried: int = 0
    dead: int = 0
    late: int = 0


class Worker:
    """A member of a group that runs `handler` for each message. A worker can be started once."""

    def __init__(
        self,
        ball: Timeball,
        group: str,
        topic: str,
        handler: Handler,
        *,
        threads: int = 1,
        processes: int = 0,
        lease: After = "60s",
        start: Start = "earliest",
        tag: str | None = None,
        sql: str | None = None,
    ) -> None:
        """Prepare a worker. It pulls nothing before `start` or `run`.

        Args:
            ball: The client.
            group: The name of the consumer group.
            topic: The topic.
            handler: The function to call with each message. For `processes`, a function at the top of a module that the
                processes can import.
            threads: The number of handlers that run at the same time, from 1 to 1,024, in each process.
            processes: The number of processes to spawn. A process that dies is replaced. 0 means threads of this
                process.
            lease: The time of a lease, as for `Timeball.pull`. It is renewed while the handler runs.
            start: Where a new group begins, as for `Timeball.pull`.
            tag: Receive only messages with this tag, as for `Timeball.pull`.
            sql: Receive only messages that match this condition, as for `Timeball.pull`.

        Raises:
            RequestError: An argument is out of range, or the handler cannot be sent to another process.
        """
        if not 1 <= threads <= limits.POP_ROWS_MAX:
            raise RequestError(f"threads={threads}: between 1 and {limits.POP_ROWS_MAX}")
        if processes < 0:
            raise RequestError(f"processes={processes}: 0 (threads of this process), or how many")
        self._ball, self._group, self._topic, self._handler = ball, group, topic, handler
        self._thread_count, self._lease_ms = threads, delay_ms(lease, "lease")
        self._lease, self._first, self._wanted = lease, start, wanted(tag, sql)
        self.counts = WorkerCounts()
        self._processes: Processes | None = None
        if processes:
            in_each = partial(
                Worker, ball, group, topic, handler,
                threads=threads, lease=lease, start=start, tag=tag, sql=sql,
            )  # fmt: skip
            self._processes = Processes(processes, in_each)
        # Guards the fields down to `_done`, and `_handlers_left`. `_waiting` and `_running` together never exceed the
        # number of threads.
        self._state = threading.Condition()
        self._waiting: deque[Message] = deque()  # pulled, and not yet taken by a thread
        self._running: set[Message] = set()  # their handlers run now
        self._done: list[Message] = []  # finished, and not yet acknowledged
        self._stopping, self._open_read = threading.Event(), OpenRead()
        self._handlers_left = 0  # threads that still handle messages: at 0 the answering thread ends
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None  # the first error of a thread, which `join` raises

    # ---- from outside -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`, SIGTERM or SIGINT. Blocks.

        Signals are handled only if `run` is called in the main thread. If an error ends the worker, `run` raises it.
        """

        def ask(_signal: int, _frame: FrameType | None) -> None:
            threading.Thread(
                target=self.stop, name="timeball-worker-stop"
            ).start()  # a signal handler must take no lock

        with ExitStack() as before:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    before.callback(signal.signal, number, signal.signal(number, ask))
            self.start()
            self.join()

    def start(self) -> None:
        """Start the threads or the processes, and return at once. Raises RequestError if called twice."""
        if self._processes is not None:
            self._processes.start()
            return
        if self._threads:
            raise RequestError("this Worker was started before; make another one")
        self._handlers_left = self._thread_count
        works = [self._pull, self._answer, *[self._handle] * self._thread_count]
        names = ["pull", "answer", *(f"handler-{number}" for number in range(self._thread_count))]
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"timeball-worker-{name}", daemon=True)
            for work, name in zip(works, names, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask the worker to end in order, and return at once. `join` waits for the end."""
        if self._processes is not None:
            self._processes.stop()
            return
        self._stopping.set()
        self._open_read.cancel()
        with self._state:
            self._state.notify_all()

    def join(self) -> None:
        """Wait for the end. If an error ended the worker, raise it."""
        if self._processes is not None:
            self._processes.join()
            return
        for thread in self._threads:
            while thread.is_alive():
                # with a time limit, because the main thread runs signal handlers between two calls
                thread.join(1.0)
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()

    # ---- the threads ------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # of any kind: the other threads must end, and `join` raises the error
            self._failure = self._failure or error
            self.stop()

    def _pull(self) -> None:
        """Pull a message for each free thread."""
        consumer = self._ball._consumer
        while not self._stopping.is_set():
            with self._state:
                self._state.wait_for(lambda: self._room() > 0 or self._stopping.is_set())
                room = self._room()
            if self._stopping.is_set():
                break
            try:
                found = consumer.pull(
                    self._topic, self._group, room, PULL_WAIT, self._first, self._lease, self._wanted, self._open_read
                )  # fmt: skip
            except (Unavailable, OverLimit) as error:
                self._pause("pull", error)
                continue
            except RequestError:
                if self._stopping.is_set():
                    break  # `stop` has cancelled the read
                raise
            with self._state:
                self._waiting.extend(found)
                self._state.notify_all()
        with self._state:
            left, self._waiting = list(self._waiting), deque()
            self._state.notify_all()
        self._try("give_back", lambda: consumer.give_back(left, None))

    def _room(self) -> int:
        return self._thread_count - len(self._waiting) - len(self._running)

    def _handle(self) -> None:
        try:
            while (message := self._next()) is not None:
                try:
                    is_done = self._run_handler(message)
                finally:
                    with self._state:
                        self._running.discard(message)
                        self._state.notify_all()
                if is_done:
                    with self._state:
                        self._done.append(message)
                        self._state.notify_all()
        finally:
            with self._state:
                self._handlers_left -= 1
                self._state.notify_all()

    def _next(self) -> Message | None:
        """Take the next message to handle; None when the worker stops."""
        with self._state:
            self._state.wait_for(lambda: self._waiting or self._stopping.is_set())
            if self._stopping.is_set():
                return None
            message = self._waiting.popleft()
            self._running.add(message)
            self._state.notify_all()
            return message

    def _run_handler(self, message: Message) -> bool:
        """Run the handler. True if the message is to be acknowledged; every other outcome is answered here."""
        try:
            with processing(message, self._group):
                self._handler(message)
        except Retry as retry:
            self.counts.retried += 1
            reason = "" if retry.__cause__ is None else reason_of(retry.__cause__)
            self._try("nack", partial(message._nack, retry.after_ms, reason))
        except Dead as error:
            self.counts.dead += 1
            logger.warning("message given up id=%s topic=%s reason=%s", message.id, self._topic, error)
            self._try("dead_letter", partial(message.dead_letter, reason=reason_of(error)))
        except Exception as error:  # of any kind: it is the handler's, and the message is delivered again
            self.counts.retried += 1
            logger.exception(
                "handler failed id=%s topic=%s attempt=%d", message.id, self._topic, message.attempts + 1
            )
            self._try("nack", partial(message.nack, reason=reason_of(error)))
        except BaseException as error:  # the thread ends, and the message must not wait until its lease ends
            self._try("nack", partial(message.nack, reason=reason_of(error)))
            raise
        else:
            return True
        return False

    def _answer(self) -> None:
        """Acknowledge finished messages. Renew leases when half of their time has passed."""
        interval_s = self._lease_ms / 2000
        clock = self._ball._clock
        renew_ns = clock.monotonic_ns() + int(interval_s * 1e9)
        while True:
            with self._state:
                left_s = (renew_ns - clock.monotonic_ns()) / 1e9
                self._state.wait_for(lambda: self._done or not self._handlers_left, max(0.0, left_s))
                done, self._done = self._done, []
                is_over = not self._handlers_left
                running, waiting = list(self._running), list(self._waiting)
            if done and not self._acknowledge(done) and not self._stopping.is_set():
                with self._state:
                    self._done[:0] = done  # no broker answered, so try these again
            if is_over:
                return
            if clock.monotonic_ns() >= renew_ns:
                # A renewal for a running handler counts as an attempt, in case this process dies. For waiting messages
                # it does not.
                self._try("extend", partial(self._renew, running, counts=True))
                self._try("extend", partial(self._renew, waiting, counts=False))
                renew_ns = clock.monotonic_ns() + int(interval_s * 1e9)

    def _renew(self, messages: list[Message], *, counts: bool) -> None:
        self._ball._consumer.change(messages, self._lease_ms, counts=counts)

    def _acknowledge(self, done: list[Message]) -> bool:
        """Acknowledge messages. False when no broker answered."""
        try:
            valid = self._ball.ack(done)
        except (Unavailable, OverLimit) as error:
            self._pause("ack", error)
            return False
        self.counts.acknowledged += valid
        self.counts.late += len(done) - valid
        return True

    def _pause(self, what: str, error: TimeballError) -> None:
        logger.warning("call failed, trying again call=%s group=%s reason=%s", what, self._group, error)
        self._stopping.wait(RETRY_PAUSE_S)

    def _try(self, what: str, call: Callable[[], object]) -> None:
        """Make a call whose failure only costs time: the lease ends, and the message is delivered again."""
        try:
            call()
        except TimeballError as error:
            logger.warning("call failed call=%s group=%s reason=%s", what, self._group, error)
