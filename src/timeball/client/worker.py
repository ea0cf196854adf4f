"""Worker: a member of a consumer group that runs a handler for each message, in threads or in processes.

    def close_if_unpaid(message: Message) -> None: ...

    Worker(ball, "billing", "orders", close_if_unpaid, threads=4).run()

The outcome of the handler decides what happens to the message:

    returns                 the message is acknowledged
    raises Retry(after)     the attempt failed, and the message is delivered again after this delay. If the broker
                            refuses the delay as too long, the retry policy decides, and the refusal is logged
    raises Dead             the message goes to the group's dead letters at once
    raises anything else    the message is delivered again by the group's retry policy, and the error is logged

The next delivery and the dead letter contain the type and the text of the exception as the reason. After `raise Retry
from error` the reason is `error`.

A message is pulled only when a thread is free to handle it. The broker counts a lease that ends without an answer as an
attempt, and a process that dies gives no answer. So the only attempts that a dying process adds are those of messages
whose handlers were running, and no message goes to the dead letters before a handler has seen it.

While a handler runs, the lease of its message is renewed, so a handler may take as long as it needs.

Threads: the puller, the thread that acknowledges and renews, and the handlers. Messages that are handled during an
acknowledging call are acknowledged together by the next call.

`stop`, or SIGTERM or SIGINT during `run`, ends the worker in order. It pulls no more messages. It gives back messages
that no handler has started, and no attempt is counted for them. Running handlers finish, and their outcomes are
answered. If no broker answers, messages are acknowledged again and again for the time limit of a call.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from types import FrameType, TracebackType
from typing import Protocol

import msgspec

from timeball.client.attempts import OpenRead
from timeball.client.consumer import Start, make_filter
from timeball.client.messages import Message, reason_of
from timeball.client.network import run
from timeball.client.timeball import Timeball
from timeball.client.tracing import processing
from timeball.model import limits
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable
from timeball.model.time_parsing import After, delay_ms

logger = logging.getLogger(__name__)

# ---- worker processes ---------------------------------------------------------------------------------------
#
# They are spawned and not forked, because gRPC does not survive a fork (calls.py). So the worker is pickled, and its
# handler must be importable in the process. Messages that a process had leased when it died are delivered again, to any
# member, when their leases end. A process whose parent has died stops by itself.

REPLACE_PAUSE_S = 1.0  # before a dead process is replaced: one that cannot start must not keep a core busy
_POLL_S = 0.5  # longest time between two checks of the processes


class Runnable(Protocol):
    """The methods of a worker that its process calls."""

    def run(self) -> None:
        """Work until stopped by `stop` or by a signal."""

    def stop(self) -> None:
        """Ask the worker to end in order."""


class Processes:
    """`count` processes that each run the worker returned by `make_worker`. A process that dies is replaced."""

    def __init__(self, count: int, make_worker: Callable[[], Runnable]) -> None:
        """Start no process yet. Raises RequestError if `make_worker` cannot be sent to another process."""
        try:
            # Spawning pickles it again, but an error there would only end the thread that replaces processes.
            ForkingPickler.dumps(make_worker)
        except Exception as error:  # pickling the parts of a handler may raise any error
            raise RequestError(
                f"this handler cannot be sent to another process ({error}): name a function at the top of a module"
            ) from error
        self._count, self._make_worker = count, make_worker
        self._spawn_context = multiprocessing.get_context("spawn")
        self._stopping = threading.Event()
        self._processes: list[SpawnProcess] = []
        self._processes_lock = threading.Lock()
        self._replacer: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        """The process ids of the live processes."""
        with self._processes_lock:
            return [
                process.pid for process in self._processes if process.pid is not None and process.is_alive()
            ]

    def start(self) -> None:
        """Spawn the processes, and replace each one that dies. Raises RequestError if called twice."""
        if self._replacer is not None:
            raise RequestError("this Worker was started before; make another one")
        for _ in range(self._count):
            self._spawn_process()
        self._replacer = threading.Thread(
            target=self._replace_dead, name="timeball-worker-processes", daemon=True
        )
        self._replacer.start()

    def stop(self) -> None:
        """Ask each process to end in order, by SIGTERM."""
        with self._processes_lock:  # no process is added after this
            self._stopping.set()
            for process in self._processes:
                process.terminate()

    def join(self) -> None:
        """Wait until all processes have ended."""
        while self._replacer is not None and self._replacer.is_alive():
            # with a time limit, because the main thread runs signal handlers between two calls
            self._replacer.join(1.0)

    def _spawn_process(self) -> None:
        """Spawn a process, unless the processes are stopping."""
        with self._processes_lock:
            if not self._stopping.is_set():
                process = self._spawn_context.Process(
                    target=_run_worker_process, args=(self._make_worker,), name="timeball-worker"
                )
                process.start()
                self._processes.append(process)

    def _replace_dead(self) -> None:
        """Replace dead processes until all have ended. Runs in a thread."""
        while self._processes:
            wait([process.sentinel for process in self._processes], _POLL_S)
            ended = [process for process in self._processes if not process.is_alive()]
            with self._processes_lock:
                self._processes = [process for process in self._processes if process not in ended]
            for process in ended:
                process.join()
                if not self._stopping.is_set():
                    logger.error(
                        "worker process ended, starting another pid=%s exit=%s", process.pid, process.exitcode
                    )
            if ended and not self._stopping.wait(REPLACE_PAUSE_S):
                for _ in ended:
                    self._spawn_process()


def _run_worker_process(make_worker: Callable[[], Runnable]) -> None:
    """Run a worker in this process until it is stopped or the parent process has died. The target of a spawn."""
    worker, parent = make_worker(), multiprocessing.parent_process()

    def stop_with_parent() -> None:
        assert parent is not None
        wait([parent.sentinel])
        worker.stop()

    threading.Thread(target=stop_with_parent, name="timeball-worker-parent", daemon=True).start()
    worker.run()


@contextmanager
def stop_on_signals(workers: Sequence[Runnable]) -> Iterator[None]:
    """Stop the workers at SIGTERM or SIGINT during the block. Does nothing outside the main thread."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        # In threads, because a signal handler must not wait for a lock.
        for worker in workers:
            threading.Thread(target=worker.stop, name="timeball-worker-stop").start()

    with ExitStack() as old_handlers:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                old_handlers.callback(signal.signal, number, signal.signal(number, stop))
        yield


# ---- the worker ---------------------------------------------------------------------------------------------

PULL_WAIT = "10s"  # the wait of a long poll
RETRY_PAUSE_S = 1.0  # after a call that no broker answered

Handler = Callable[[Message], object]


class Retry(Exception):
    """Raised by a handler: the attempt failed, and the message is delivered again after the delay `after`.

    Without `after`, the group's retry policy sets the delay.
    """

    def __init__(self, after: After | None = None) -> None:
        super().__init__(after)
        self.after_ms = None if after is None else delay_ms(after)


class Dead(Exception):
    """Raised by a handler: no further attempt can help, so the message goes to the group's dead letters."""


class WorkerCounts(msgspec.Struct):
    """Numbers of handled messages since the start, by outcome.

    `late`: messages acknowledged after their lease had ended, so they are delivered again.
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
        self._lease, self._start_position, self._filter = lease, start, make_filter(tag, sql)
        self.counts = WorkerCounts()
        self._processes: Processes | None = None
        if processes:
            make_worker = partial(
                Worker, ball, group, topic, handler,
                threads=threads, lease=lease, start=start, tag=tag, sql=sql,
            )  # fmt: skip
            self._processes = Processes(processes, make_worker)
        # Guards `_queued`, `_running`, `_handled` and `_live_handlers`, and is notified when they change. `_queued` and
        # `_running` together never have more messages than there are handler threads.
        self._state_changed = threading.Condition()
        self._queued: deque[Message] = deque()  # pulled, and not yet taken by a handler thread
        self._running: set[Message] = set()  # their handlers are running
        self._handled: list[Message] = []  # handled, and not yet acknowledged
        self._stopping, self._open_read = threading.Event(), OpenRead()
        self._live_handlers = 0  # live handler threads; at 0 the acknowledging thread ends
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None  # the first error of a thread, which `join` raises

    # ---- from outside -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`, SIGTERM or SIGINT. Blocks.

        Signals are handled only if `run` is called in the main thread. Raises the error that ended the worker, if any.
        """
        with stop_on_signals([self]):
            self.start()
            self.join()

    def start(self) -> None:
        """Start the threads or the processes, and return at once. Raises RequestError if called twice."""
        if self._processes is not None:
            self._processes.start()
            return
        if self._threads:
            raise RequestError("this Worker was started before; make another one")
        self._live_handlers = self._thread_count
        targets = [self._pull, self._acknowledge_and_renew, *[self._handle] * self._thread_count]
        names = ["pull", "answer", *(f"handler-{number}" for number in range(self._thread_count))]
        self._threads = [
            threading.Thread(
                target=self._run_guarded, args=(target,), name=f"timeball-worker-{name}", daemon=True
            )
            for target, name in zip(targets, names, strict=True)
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
        with self._state_changed:
            self._state_changed.notify_all()

    def join(self) -> None:
        """Wait for the end. Raises the error that ended the worker, if any."""
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

    def _run_guarded(self, target: Callable[[], None]) -> None:
        """Run a thread's function. An error of any kind stops the worker, and `join` raises it."""
        try:
            target()
        except BaseException as error:  # an error of any kind must stop the other threads
            self._failure = self._failure or error
            self.stop()

    def _pull(self) -> None:
        """Pull as many messages as there are free threads, until the worker stops. Then give back the queued ones."""
        consumer = self._ball._consumer
        while not self._stopping.is_set():
            with self._state_changed:
                self._state_changed.wait_for(lambda: self._free_threads() > 0 or self._stopping.is_set())
                free_threads = self._free_threads()
            if self._stopping.is_set():
                break
            try:
                messages = consumer.pull(
                    self._topic, self._group, free_threads, PULL_WAIT, self._start_position, self._lease, self._filter,
                    self._open_read,
                )  # fmt: skip
            except (Unavailable, OverLimit) as error:
                self._log_failure("pull", error)
                self._stopping.wait(RETRY_PAUSE_S)
                continue
            except RequestError:
                if self._stopping.is_set():
                    break  # `stop` has cancelled the read
                raise
            with self._state_changed:
                self._queued.extend(messages)
                self._state_changed.notify_all()
        with self._state_changed:
            queued, self._queued = list(self._queued), deque()
            self._state_changed.notify_all()
        self._try_call("give_back", lambda: consumer.give_back(queued))

    def _free_threads(self) -> int:
        """Count the handler threads without a message. The caller holds `_state_changed`."""
        return self._thread_count - len(self._queued) - len(self._running)

    def _handle(self) -> None:
        """Run the handler for queued messages until the worker stops. Runs in each handler thread."""
        try:
            while (message := self._next()) is not None:
                try:
                    is_done = self._run_handler(message)
                finally:
                    with self._state_changed:
                        self._running.discard(message)
                        self._state_changed.notify_all()
                if is_done:
                    with self._state_changed:
                        self._handled.append(message)
                        self._state_changed.notify_all()
        finally:
            with self._state_changed:
                self._live_handlers -= 1
                self._state_changed.notify_all()

    def _next(self) -> Message | None:
        """Wait for the next message, and move it from the queued to the running ones. Returns None at a stop."""
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._queued or self._stopping.is_set())
            if self._stopping.is_set():
                return None
            message = self._queued.popleft()
            self._running.add(message)
            self._state_changed.notify_all()
            return message

    def _run_handler(self, message: Message) -> bool:
        """Run the handler, and answer for the message as its exception says (see the module's docstring).

        Returns True if the handler raised none: then the caller acknowledges the message.
        """
        try:
            with processing(message, self._group):
                self._handler(message)
        except Retry as retry:
            self.counts.retried += 1
            reason = "" if retry.__cause__ is None else reason_of(retry.__cause__)
            self._try_call("nack", partial(self._nack, message, retry.after_ms, reason))
        except Dead as error:
            self.counts.dead += 1
            reason = reason_of(error)
            logger.warning("message given up id=%s topic=%s reason=%s", message.id, self._topic, reason)
            self._try_call("dead_letter", partial(message.dead_letter, reason=reason))
        except Exception as error:  # a handler may raise any error
            self.counts.retried += 1
            logger.exception(
                "handler failed id=%s topic=%s attempt=%d", message.id, self._topic, message.attempts + 1
            )
            self._try_call("nack", partial(message.nack, reason=reason_of(error)))
        except BaseException as error:  # the thread ends, but the message must not wait until its lease ends
            self._try_call("nack", partial(message.nack, reason=reason_of(error)))
            raise
        else:
            return True
        return False

    def _nack(self, message: Message, after_ms: int | None, reason: str) -> None:
        """Give a message back for `reason`, for a delivery after `after_ms`, or by the retry policy if it is None.

        If the broker refuses the delay, the retry policy decides. Raises TimeballError.
        """
        try:
            run(message._nack(after_ms, reason, True))
        except RequestError as error:
            if after_ms is None:
                raise
            # Without a second nack, the message would come back only when its lease ends.
            logger.error(
                "delay refused, retry policy used group=%s id=%s reason=%s", self._group, message.id, error
            )
            message.nack(reason=reason or reason_of(error))

    def _acknowledge_and_renew(self) -> None:
        """Acknowledge handled messages, and renew the other leases when half of their time has passed.

        Runs in a thread until the handler threads have ended, and then until all handled messages are acknowledged, or
        for the time limit of a call.
        """
        interval_s = self._lease_ms / 2000  # half a lease
        clock = self._ball._clock
        renew_ns = clock.monotonic_ns() + int(interval_s * 1e9)
        end_ns: int | None = None  # when the attempts to acknowledge end; set after the last handler
        while True:
            with self._state_changed:
                remaining_s = (renew_ns - clock.monotonic_ns()) / 1e9
                self._state_changed.wait_for(
                    lambda: self._handled or not self._live_handlers, max(0.0, remaining_s)
                )
                handled, self._handled = self._handled, []
                is_over = not self._live_handlers
                running, queued = list(self._running), list(self._queued)
            if is_over and end_ns is None:
                end_ns = clock.monotonic_ns() + self._ball._consumer.timeout_ms * 1_000_000
            is_answered = not handled or self._acknowledge(handled)
            if is_over and is_answered:
                return
            if end_ns is not None and clock.monotonic_ns() >= end_ns:
                logger.error(
                    "handled messages not acknowledged group=%s messages=%d", self._group, len(handled)
                )
                return
            if not is_answered:
                with self._state_changed:
                    self._handled[:0] = handled  # no broker answered, so try these again
                # Not `_stopping`, because a worker that stops must not try without a pause.
                time.sleep(RETRY_PAUSE_S)
            if clock.monotonic_ns() >= renew_ns:
                # A renewal for a running handler counts as an attempt, in case this process dies. A renewal for a
                # queued message does not.
                self._try_call("extend", partial(self._renew_leases, running, counts=True))
                self._try_call("extend", partial(self._renew_leases, queued, counts=False))
                renew_ns = clock.monotonic_ns() + int(interval_s * 1e9)

    def _renew_leases(self, messages: list[Message], *, counts: bool) -> None:
        """Renew leases. `counts`: count each as an attempt. Raises TimeballError."""
        self._ball._consumer.change(messages, self._lease_ms, counts=counts)

    def _acknowledge(self, handled: list[Message]) -> bool:
        """Acknowledge messages and count the outcomes. Returns False if no broker answered."""
        try:
            acknowledged = self._ball.ack(handled)
        except (Unavailable, OverLimit) as error:
            self._log_failure("ack", error)
            return False
        self.counts.acknowledged += acknowledged
        self.counts.late += len(handled) - acknowledged
        return True

    def _log_failure(self, call_name: str, error: TimeballError) -> None:
        logger.warning("call failed, trying again call=%s group=%s reason=%s", call_name, self._group, error)

    def _try_call(self, call_name: str, call: Callable[[], object]) -> None:
        """Make a call that may fail, and log its error. The leases then end after their time.

        The messages are delivered again after that. `call_name`: for the log.
        """
        try:
            call()
        except TimeballError as error:
            logger.warning("call failed call=%s group=%s reason=%s", call_name, self._group, error)
