"""The local file for records that Kafka refuses in every form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from timeball.edges.kafka.options import Counts
from timeball.edges.kafka.records import Undeliverable, UndeliverableFile
from timeball.model.errors import SetupError

LINE = Undeliverable(
    id="in-0-7", reason="Kafka: Broker: Message size too large", to="out", topic="in", partition=0, offset=7,
    due_ms=1_795_000_000_000, key=None, value=b"\x00\xff", headers=[("h", b"\xfe"), ("n", None)],
)  # fmt: skip


def test_each_line_contains_the_whole_record(tmp_path: Path) -> None:
    counts = Counts()
    file = UndeliverableFile(tmp_path / "lines", counts)
    file.check()
    assert not file.path.exists(), "the check creates no file, which would look like a refused record"
    file.add(LINE)
    UndeliverableFile(tmp_path / "lines", counts).add(LINE)
    lines = file.path.read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Undeliverable) for line in lines] == [LINE, LINE]
    assert counts.filed == 2


def test_a_file_that_cannot_be_written_is_a_setup_error_at_the_check(tmp_path: Path) -> None:
    file = UndeliverableFile(tmp_path / "no such folder" / "lines", Counts())
    with pytest.raises(SetupError, match=r"--undeliverable .*lines: cannot be written"):
        file.check()
    with pytest.raises(SetupError, match=r"--undeliverable .*lines: No such file or directory"):
        file.add(LINE)
