"""The last resort of a bridge: a local file with the records that Kafka takes neither as they are nor as dead letters.

One JSON document a line, synced before the bridge goes on. A bridge that is killed between the two writes the line once
more, so a line may stand twice; `id` tells. Bytes are in base64, as a key, a value or a header of Kafka may hold any.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

from timeball.errors import SetupError
from timeball.kafka.counts import Counts

logger = logging.getLogger(__name__)


class Undeliverable(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `topic`, `partition` and `offset` name the record that was read, `to` the topic that it was for."""

    id: str
    reason: str
    to: str
    topic: str
    partition: int
    offset: int
    due_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


class UndeliverableFile:
    """Appends lines to one file, which is made with the first of them."""

    _lock = (
        threading.Lock()
    )  # of the process, as both threads of its bridge write to the file and to the count

    def __init__(self, path: Path, counts: Counts) -> None:
        self.path, self._counts = path, counts

    def check(self) -> None:
        """Raise SetupError when the file could not be written later."""
        place = self.path if self.path.exists() else self.path.absolute().parent
        if not os.access(place, os.W_OK):
            raise SetupError(
                f"--undeliverable {self.path}: cannot be written; name a file that this process may write"
            )

    def add(self, line: Undeliverable) -> None:
        """Append a line that is on disk afterwards. Raises SetupError."""
        try:
            with self._lock, self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._counts.filed += 1
        except OSError as error:
            raise SetupError(
                f"--undeliverable {self.path}: {error.strerror}; make room, or name a file that this process may write"
            ) from error
        logger.error("record filed away file=%s id=%s reason=%s", self.path, line.id, line.reason)
