"""The two implementations of the hot codec: a compiled one, if the build had a compiler, and Python's.

    python      frame.py, sends.py, records.py and SendRows (handlers/send_rows.py): one message at a time; it
                is the reference
    compiled    send_runs.pyx, send_headers.pyx, send_columns.pyx: plain sends in runs; send_frames.pyx: their rows of
                the log; plain_pulls.pyx: pulls that are answered at once; stored_messages.pyx: the messages in their
                answers. Unusual requests are left to the reference.

For the same input, both produce the same columns, bytes and errors. `--codec python` forces the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from timeball.edges.remoting.codec import frame, records
from timeball.edges.remoting.codec.frame import Cut, Frame
from timeball.edges.remoting.codec.records import Host
from timeball.log.format import Frame as LogFrame
from timeball.log.queue_entry import EntryArray
from timeball.model.config import CodecChoice
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

    destinations: list[tuple[str, int]]  # for each topic: its name, and the greatest queue id asked for
    size_bytes: int  # of bodies and properties
    needs_time: bool  # whether `plan` uses the time: for a delay, or for a send without a time of birth

    def plan(
        self,
        born_host: bytes,
        now_ms: int,
        delay_ms_max: int,
        timing_zone: str,
        user_names: frozenset[str],
    ) -> None:
        """Complete the rows with the born host, the time and the delays. Raises InvalidDelay."""

    def frames(self) -> list[Frame]:
        """Return the frames that the run was made of."""

    def requests(self) -> list[tuple[int, int]]:
        """Return opaque and serialisation of each send that expects an answer."""

    def __iter__(self) -> Iterator[SendRow]: ...

    def __len__(self) -> int: ...


class StoredFrame(Protocol):
    """The rows of one frame of the log, opened to be written as stored messages."""

    first_seq: int
    end_seq: int  # behind the last row

    def put(
        self, out: bytearray, seqs: list[int] | EntryArray, at: int, store_host: Host, bytes_max: int
    ) -> int:
        """Append the messages `seqs[at:]` that are in this frame and fit, and return the position behind the last.

        `seqs` may also be entries of a queue, which contain the sequence numbers. Afterwards, `out` has at most
        `bytes_max` bytes, or a single message. Raises OutOfRange for a row that is not visible.
        """


class PlainPull(Protocol):
    """A pull with nothing unusual in its header. See PullFields (handlers/pulls.py)."""

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
    # The header without offsets, bounds and request number. All pulls with the same subject get the same decision.
    subject: bytes

    def frame(self) -> Frame:
        """Return the frame that contained the pull."""

    def begin_answer(self, next_offset: int, min_offset: int, max_offset: int) -> bytearray:
        """Return the beginning of the answer's frame, up to the stored messages."""

    def end_answer(self, answer: bytearray) -> None:
        """Complete an answer from `begin_answer` after the stored messages were appended."""


class _NoPull:
    """The pull type of a codec that creates no plain pulls: no frame is an instance of it."""


def _no_run(*_: object) -> Any:
    raise AssertionError("only the compiled codec makes runs")


@dataclass(frozen=True)
class Codec:
    """One of the two implementations.

    `join`, `log_rows` and `encode_replies` work on the runs that `cut` creates, and `pull` is its type of plain pulls.
    Python's implementation creates neither runs nor plain pulls.
    """

    name: str
    cut: Cut
    encode_each: Callable[..., list[bytes]]
    open_frame: Callable[[pa.Buffer, LogFrame], StoredFrame]
    join: Callable[[list[Any]], pa.RecordBatch] = _no_run
    log_rows: Callable[..., Any] = _no_run
    encode_replies: Callable[..., bytes] = _no_run
    pull: type[Any] = _NoPull


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


def codec_of(choice: CodecChoice) -> Codec:
    """Return the codec for this setting."""
    return COMPILED if COMPILED is not None and choice == "auto" else PYTHON
