"""The files of one backup: whole segments, the last one up to its last whole frame, and the data files of that row."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bad_disk import PAGE, BadDisk
from tests.node_fixture import running_node

from timeball.io.files import RealFiles
from timeball.log import format as fmt
from timeball.model.errors import Corrupt, NotFound
from timeball.node.backup import plan

LOG = "log/0000000001.log"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    with running_node(folder) as node, node.client() as ball:
        ball.send_many([{"body": f"{i}", "after": "7200s"} for i in range(100)], topic="t")
        ball.compact()
        ball.send_many([{"body": f"{i}", "after": "9000s"} for i in range(100)], topic="t")
        ball.compact()
        ball.send("t", "the last")
    return folder


def change(path: Path, position: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def test_a_plan_ends_behind_the_last_whole_frame_and_names_the_live_files(data: Path) -> None:
    found = plan(RealFiles(data))
    assert [planned.name for planned in found.files if planned.name.endswith(".log")] == [LOG]
    (log,) = (planned for planned in found.files if planned.name == LOG)
    assert fmt.ALIGN < log.used_bytes < log.buffer.size
    assert found.first_row == 1 and found.row > 200
    live = {path.relative_to(data).as_posix() for path in data.glob("pending/bucket=*/*.parquet")}
    assert {planned.name for planned in found.files} == {LOG, *live} and len(live) == 2


def test_a_commit_that_is_being_written_is_left_out(data: Path) -> None:
    whole = plan(RealFiles(data))
    end = next(planned.used_bytes for planned in whole.files if planned.name == LOG)
    change(data / LOG, end, b"half a frame")
    assert plan(RealFiles(data)).row == whole.row


def test_damage_in_what_was_acknowledged_is_refused_by_name(data: Path) -> None:
    change(data / LOG, fmt.ALIGN + 200, b"\xff" * 8)
    with pytest.raises(Corrupt, match=LOG):
        plan(RealFiles(data))


@pytest.mark.parametrize("fault", ["cut", "missing"])
def test_a_data_file_that_is_not_as_the_log_says_is_refused(
    data: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt = next(data.glob("pending/bucket=*/*.parquet"))
    if fault == "missing":
        hurt.unlink()
    else:
        hurt.write_bytes(hurt.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=hurt.name):
        plan(RealFiles(data))


def test_a_byte_of_a_data_file_that_is_wrong_is_refused(data: Path) -> None:
    hurt = next(data.glob("pending/bucket=*/*.parquet"))
    size_bytes = hurt.stat().st_size
    change(hurt, size_bytes // 3, bytes([hurt.read_bytes()[size_bytes // 3] ^ 1]))
    with pytest.raises(Corrupt, match=f"{hurt.name}: .*; restore this file from a copy"):
        plan(RealFiles(data))


def test_a_folder_without_a_log_is_none_of_ours(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no log"):
        plan(RealFiles(tmp_path))


@pytest.mark.parametrize("pattern", ["log/*.log", "pending/bucket=*/*.parquet"])
def test_a_page_that_the_disk_cannot_read_is_refused_by_name(data: Path, pattern: str) -> None:
    files = BadDisk(data)
    hurt = next(data.glob(pattern)).relative_to(data).as_posix()
    files.bad = {hurt: [PAGE]}
    with pytest.raises(Corrupt, match=f"{hurt}: the disk cannot read byte {PAGE}; restore this file"):
        plan(files)
