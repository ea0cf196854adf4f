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
    """A folder with messages in two data files and in the log."""
    folder = tmp_path / "data"
    with running_node(folder) as node, node.client() as ball:
        ball.send_many([{"body": f"{number}", "after": "7200s"} for number in range(100)], topic="t")
        ball.compact()
        ball.send_many([{"body": f"{number}", "after": "9000s"} for number in range(100)], topic="t")
        ball.compact()
        ball.send("t", "the last")
    return folder


def change(path: Path, position: int, content: bytes) -> None:
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(content)


def test_a_plan_has_the_log_up_to_its_last_whole_frame_and_all_live_data_files(data: Path) -> None:
    backup_plan = plan(RealFiles(data))
    assert [planned.name for planned in backup_plan.files if planned.name.endswith(".log")] == [LOG]
    (log,) = (planned for planned in backup_plan.files if planned.name == LOG)
    assert fmt.ALIGN < log.used_bytes < log.buffer.size
    assert backup_plan.first_row == 1 and backup_plan.row > 200
    live = {path.relative_to(data).as_posix() for path in data.glob("pending/bucket=*/*.parquet")}
    assert {planned.name for planned in backup_plan.files} == {LOG, *live} and len(live) == 2


def test_a_plan_leaves_out_a_commit_that_is_being_written(data: Path) -> None:
    whole = plan(RealFiles(data))
    end = next(planned.used_bytes for planned in whole.files if planned.name == LOG)
    change(data / LOG, end, b"half a frame")
    assert plan(RealFiles(data)).row == whole.row


def test_a_damaged_frame_that_was_acknowledged_is_refused_with_its_file(data: Path) -> None:
    change(data / LOG, fmt.ALIGN + 200, b"\xff" * 8)
    with pytest.raises(Corrupt, match=LOG):
        plan(RealFiles(data))


@pytest.mark.parametrize("fault", ["cut", "missing"])
def test_a_missing_data_file_and_one_of_another_size_are_refused(
    data: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = next(data.glob("pending/bucket=*/*.parquet"))
    if fault == "missing":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=damaged.name):
        plan(RealFiles(data))


def test_a_data_file_with_a_wrong_byte_is_refused(data: Path) -> None:
    damaged = next(data.glob("pending/bucket=*/*.parquet"))
    size_bytes = damaged.stat().st_size
    change(damaged, size_bytes // 3, bytes([damaged.read_bytes()[size_bytes // 3] ^ 1]))
    with pytest.raises(Corrupt, match=f"{damaged.name}: .*; restore this file from a copy"):
        plan(RealFiles(data))


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no log"):
        plan(RealFiles(tmp_path))


@pytest.mark.parametrize("pattern", ["log/*.log", "pending/bucket=*/*.parquet"])
def test_a_page_that_the_disk_cannot_read_is_refused_by_name(data: Path, pattern: str) -> None:
    files = BadDisk(data)
    damaged = next(data.glob(pattern)).relative_to(data).as_posix()
    files.bad = {damaged: [PAGE]}
    with pytest.raises(Corrupt, match=f"{damaged}: the disk cannot read byte {PAGE}; restore this file"):
        plan(files)
