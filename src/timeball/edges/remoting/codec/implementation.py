"""Select the implementation of the hot codec: the compiled one if the build had a C compiler, otherwise Python's.

    python      frame.py, sends.py, records.py and SendRows (handlers/sends.py): one message at a time. It is the
                reference
    compiled    send_runs.pyx, send_headers.pyx, send_columns.pyx: plain sends in runs. send_frames.pyx: their rows of
                the log. plain_pulls.pyx: pulls that are answered at once. stored_messages.pyx: the messages in their
                answers. The reference handles all unusual requests

For the same input, both produce the same columns, bytes and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from timeball.edges.remoting.codec import frame, records
from timeball.edges.remoting.codec.frame import Cut, Frame
from timeball.edges.remoting.codec.records import Host
from timeball.log.format import EntryArray
from timeball.log.format import Frame as LogFrame
from timeball.model.message import SendRow

try:
    from timeball.edges.remoting.codec import (  # type: ignore[attr-defined]
        plain_pulls,
        send_columns,
        send_frames,
        send_runs,
        stored_messages,
    )
except ImportError:  # The build had no compiler.
    plain_pulls = send_columns = send_frames = send_runs = stored_messages = None


class SendRun(Protocol):
    """Consecutive plain sends in the bytes of one connection."""

    destinations: list[tuple[str, int]]  # the name of each topic, and the greatest queue id requested in it
    size_bytes: int  # of bodies and properties
    needs_time: bool  # whether `plan` uses `now_ms`: for a delay, or for a send without born time

    def plan(
        self,
        born_host: bytes,
        now_ms: int,
        delay_ms_max: int,
        user_names: frozenset[str],
    ) -> None:
        """Complete the rows with the born host, the time and the delays (`delays.plan`). Raises InvalidDelay."""

    def frames(self) -> list[Frame]:
        """Return the frames of the run."""

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of each send that is not one-way."""

    def __iter__(self) -> Iterator[SendRow]: ...

    def __len__(self) -> int: ...


class StoredFrame(Protocol):
    """An opened frame of the log, whose rows can be encoded as stored messages."""

    first_seq: int
    end_seq: int  # the last row's sequence number, plus 1

    def append_messages(
        self, out: bytearray, seqs: list[int] | EntryArray, begin: int, store_host: Host, bytes_max: int
    ) -> int:
        """Append the messages `seqs[begin:]` that are in this frame and fit. Returns the index of the first left out.

        `seqs` may also be queue entries, which contain the sequence numbers. Afterwards, `out` has at most `bytes_max`
        bytes, or a single message. Raises OutOfRange for a row that is not visible.
        """


class PlainPull(Protocol):
    """A pull whose header has only the usual fields. See PullFields (handlers/pulls.py)."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    subscription: str | None
    sub_version: int
    expression_type: str | None
    max_msg_bytes: int | None
    # The header without offsets, limits and opaque. The same permission and filter apply to all pulls with one subject.
    subject: bytes

    def frame(self) -> Frame:
        """Return the original frame of the pull."""

    def begin_answer(self, next_offset: int, min_offset: int, max_offset: int) -> bytearray:
        """Encode the frame of an answer up to the stored messages, which the caller appends."""

    def end_answer(self, answer: bytearray) -> None:
        """Set the length of an answer from `begin_answer`, after the stored messages were appended."""


class _NoPlainPull:
    """The pull type of a codec without plain pulls. It has no instances."""


def _not_supported(*_: object) -> Any:
    raise AssertionError("only the compiled codec creates runs")


@dataclass(frozen=True)
class Codec:
    """The functions and types of one implementation.

    `cut` splits received bytes into frames, runs of sends and plain pulls. `join`, `log_rows` and `encode_replies` work
    on these runs, and `pull` is the type of these plain pulls. Python's implementation creates only frames.
    """

    name: str
    cut: Cut
    encode_each: Callable[..., list[bytes]]
    open_frame: Callable[[pa.Buffer, LogFrame], StoredFrame]
    join: Callable[[list[Any]], pa.RecordBatch] = _not_supported
    log_rows: Callable[..., Any] = _not_supported
    encode_replies: Callable[..., bytes] = _not_supported
    pull: type[Any] = _NoPlainPull


PYTHON = Codec("python", frame.cut, records.encode_each, records.StoredFrame)
COMPILED = (
    None
    if send_runs is None
    else Codec(
        "compiled",
        send_runs.cut,
        stored_messages.encode_each,
        stored_messages.StoredFrame,
        send_columns.join,
        send_frames.log_rows,
        send_columns.encode_replies,
        plain_pulls.PlainPull,
    )
)
CODEC = COMPILED or PYTHON
