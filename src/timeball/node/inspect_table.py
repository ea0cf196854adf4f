"""The live data files of the pending table, compared with the log, for `timeball dump`."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from timeball.cluster.replica_log import IDENTITY_NAME
from timeball.io.files import Files
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import Kind
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.catalog import DELTA_LOG
from timeball.table.data_file import check_all
from timeball.table.layout import FOLDER as TABLE
from timeball.table.live_files import live_name


class DataFileCheck:
    """Finds the live data files while the log is read, and checks them.

    Call `add` for each frame of the log in order, and then `finish`.
    """

    def __init__(self, files: Files, facts: cp.Facts) -> None:
        """Begin before the first frame. `facts`: those of the checkpoint, or of an empty log."""
        self._files = files
        self._facts = facts  # the newest state that names the live files: of the checkpoint or of a snapshot
        self._attachments: list[tuple[int, Attachment]] = []  # of the log, with their sequence numbers

    def add(self, segment: pa.Buffer, frame: fmt.Frame, rows: pa.RecordBatch) -> None:
        """Add the next frame of the log, and its rows without secret values."""
        if frame.flags & fmt.SNAPSHOT:
            # Decoded again, because a snapshot is a secret value, which `rows` do not contain.
            snapshot = fmt.decode_rows(segment, frame)
            facts = cp.decode(snapshot.column("body")[0].as_py()).facts
            self._facts = facts if facts.seq > self._facts.seq else self._facts
        kinds = rows.column("kind").to_numpy(zero_copy_only=False)
        for index in (kinds == int(Kind.TABLE)).nonzero()[0].tolist():
            change = att.decode_change(rows.column("body")[index].as_py())
            if isinstance(change, Attachment):
                self._attachments.append((frame.first_seq + index, change))

    def finish(self, *, is_log_whole: bool, verify: bool) -> list[tuple[str, str]]:
        """Check the existence and the size of the live data files, and with `verify` all their bytes.

        Returns a pair of file name and fault for each damaged one. A missing file is damage only if the log is whole,
        because a lost row may have removed the file from the table.
        """
        attachments = [(seq, change) for seq, change in self._attachments if seq >= self._facts.seq]
        entries = att.live_files(msgspec.convert(self._facts.files, list[FileEntry]), attachments)
        # A table in an object store has only copies of some files here, and a replica fetches missing files.
        is_complete = self._files.exists(DELTA_LOG) and not self._files.exists(IDENTITY_NAME)
        # All sizes are read first. A file that leaves the table meanwhile stays on disk for some time, but perhaps not
        # until the bytes of all files are read.
        sizes = {entry.path: self._size(entry.path) for entry in entries}
        faults = []
        for entry in entries:
            name, size_bytes = f"{TABLE}/{entry.path}", sizes[entry.path]
            fault = None
            if size_bytes is None:
                fault = "it is missing" if is_complete and is_log_whole else None
            elif size_bytes != entry.size_bytes:
                fault = f"it has {size_bytes} bytes, and the log says {entry.size_bytes}"
            elif verify:
                fault = self._check_bytes(entry.path)
            if fault is not None:
                faults.append((name, fault))
        return faults

    def _size(self, path: str) -> int | None:
        """Read the size of a data file. None if it is missing.

        If only its link exists, the size is that of the link: a start restores the file from it.
        """
        for name in (f"{TABLE}/{path}", live_name(path)):
            try:
                return self._files.size(name)
            except NotFound:
                continue
        return None

    def _check_bytes(self, path: str) -> str | None:
        """Check all checksums of a data file. Returns its fault, if any."""
        for name in (f"{TABLE}/{path}", live_name(path)):
            try:
                check_all(self._files.map_readonly(name))
                return None
            except NotFound:
                continue
            except Corrupt as error:
                return str(error)
        return None  # it has left the table since its size was measured
