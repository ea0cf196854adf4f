"""The local file for records that Kafka accepts neither unchanged nor as dead letters.

Each line is a JSON document, synced before the bridge goes on. A bridge that is killed between the line and the commit
of its position writes the line again. So a line may occur twice, with the same `id`. Bytes are in base64, because a
key, a value or a header of Kafka may be any bytes.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

from timeball.edges.kafka.options import Counts
from timeball.model.errors import SetupError

logger = logging.getLogger(__name__)


class Undeliverable(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file.

    `topic`, `partition` and `offset` identify the record that was read. `to` is the topic it could not be written to.
    """

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
    """Appends lines to one file. The first line creates the file."""

    # one lock per process, because both threads of its bridge write to the file and to `counts.filed`
    _lock = threading.Lock()

    def __init__(self, path: Path, counts: Counts) -> None:
        self.path, self._counts = path, counts

    def check(self) -> None:
        """Raise SetupError if the file cannot be written."""
        existing_path = self.path if self.path.exists() else self.path.absolute().parent
        if not os.access(existing_path, os.W_OK):
            raise SetupError(
                f"--undeliverable {self.path}: cannot be written; name a file that this process may write"
            )

    def add(self, line: Undeliverable) -> None:
        """Append a line and sync the file. Raises SetupError."""
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
