"""A manifest is written last and read first."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from timeball.io.files import RealFiles
from timeball.model.errors import Corrupt, SetupError
from timeball.node import backup
from timeball.node.backup import CopiedFile, Manifest, Progress


def test_a_saved_manifest_is_loaded_and_removes_the_record_of_progress(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    progress = Progress(files, "/data")
    one = CopiedFile("log/1.log", 20, 10, 5)
    progress.add(one)
    assert Progress(files, "/data").copied == {"log/1.log": one}
    with pytest.raises(SetupError, match="unfinished backup of /data"):
        Progress(files, "/other")
    with pytest.raises(SetupError, match="not finished"):
        backup.load(files)
    manifest = Manifest(row=7, first_row=1, made_ms=5, source="/data", files=[one])
    backup.save(files, manifest)
    assert backup.load(files) == manifest and manifest.used_bytes == 10
    assert [path.name for path in tmp_path.iterdir()] == [backup.NAME]


def test_a_malformed_or_newer_manifest_is_refused(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    (tmp_path / backup.NAME).write_text("{}")
    with pytest.raises(Corrupt, match="cannot be read"):
        backup.load(files)
    newer = Manifest(format=backup.FORMAT + 1, row=1, first_row=1, made_ms=0, source="", files=[])
    (tmp_path / backup.NAME).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(SetupError, match="format"):
        backup.load(files)


def test_a_checksum_covers_the_used_bytes_only() -> None:
    assert backup.crc32c(pa.py_buffer(b"123456789rest"), 9) == 0xE3069283  # the check value of CRC-32C
