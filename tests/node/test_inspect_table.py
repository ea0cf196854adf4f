"""Damage of the pending table's live data files is in the summary of a dump, and nothing else is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.bad_disk import PAGE, BadDisk
from tests.node_fixture import running_node

from timeball.cluster.replica_log import IDENTITY_NAME
from timeball.io.files import RealFiles
from timeball.log import checkpoint as cp
from timeball.log.segment import segment_name
from timeball.node.inspect_folder import FolderDump, Selection, summarise
from timeball.table.catalog import DELTA_LOG

ALL = Selection()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two live data files, one attached before a snapshot and one after it, and two former ones."""
    folder = tmp_path_factory.mktemp("original") / "data"
    with running_node(folder, segment_bytes=1 << 20) as node, node.client() as ball:
        for topic in ("a", "b"):
            rows = [{"body": os.urandom(100), "after": "40d"} for _ in range(500)]
            ball.send_many(rows, topic=topic)
            ball.compact()
            if topic == "a":
                node.run(node.node.maintenance.snapshot())
    return folder


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    """A copy of the original folder, which the test may change."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def damage(data: Path, *, verify: bool, selection: Selection = ALL) -> list[tuple[str, str]]:
    """Summarise the folder. Returns the file and the first part of the text of each damage."""
    summary = summarise(FolderDump(RealFiles(data)), selection, verify=verify)
    return [(damage.file, damage.text.partition(";")[0]) for damage in summary.damage]


def live_files(data: Path) -> list[Path]:
    """List the data files of the pending table."""
    return sorted(data.glob("pending/bucket=*/*.parquet"))


def lose(data: Path, file: Path) -> str:
    """Remove a data file with its link. Returns its name."""
    file.unlink()
    (data / "pending" / "_live" / file.stem).unlink()
    return file.relative_to(data).as_posix()


@pytest.mark.parametrize("verify", [False, True])
def test_a_shortened_and_a_missing_data_file_are_damage_also_without_the_checkpoint(
    data: Path, verify: bool
) -> None:
    assert damage(data, verify=verify) == []
    first, second = live_files(data)
    size_bytes = first.stat().st_size
    os.truncate(first, size_bytes - 1)
    expected = [
        (first.relative_to(data).as_posix(), f"it has {size_bytes - 1} bytes, and the log says {size_bytes}"),
        (lose(data, second), "it is missing"),
    ]
    assert sorted(damage(data, verify=verify)) == expected
    (data / cp.NAME).unlink()
    assert sorted(damage(data, verify=verify)) == expected


def test_a_wrong_byte_of_a_data_file_is_found_by_verify_only(data: Path) -> None:
    for damaged in live_files(data):
        content = bytearray(damaged.read_bytes())
        content[len(content) // 3] ^= 1
        damaged.write_bytes(content)
    assert damage(data, verify=False) == []
    assert sorted(name for name, _ in damage(data, verify=True)) == [
        damaged.relative_to(data).as_posix() for damaged in live_files(data)
    ]


def test_a_data_file_whose_link_exists_is_not_missing(data: Path) -> None:
    live_files(data)[0].unlink()
    assert damage(data, verify=True) == []


def test_missing_data_files_are_no_damage_in_a_replica_or_with_an_object_store(data: Path) -> None:
    lost = lose(data, live_files(data)[0])
    assert damage(data, verify=True) == [(lost, "it is missing")]
    (data / IDENTITY_NAME).touch()
    assert damage(data, verify=True) == []
    (data / IDENTITY_NAME).unlink()
    shutil.rmtree(data / DELTA_LOG)
    assert damage(data, verify=True) == []


def test_a_missing_data_file_is_no_damage_if_the_log_is_damaged_or_only_partly_read(data: Path) -> None:
    lose(data, live_files(data)[0])
    assert damage(data, verify=False, selection=Selection(to_seq=0)) == []
    log = data / segment_name(1)
    content = bytearray(log.read_bytes())
    content[200] ^= 1
    log.write_bytes(content)
    assert [name for name, _ in damage(data, verify=False)] == [segment_name(1)]


def test_pages_that_the_disk_cannot_read_are_damage_with_their_positions(data: Path) -> None:
    files = BadDisk(data)
    damaged = live_files(data)[0].relative_to(data).as_posix()
    end = files.size(segment_name(1)) - PAGE
    files.bad = {damaged: [2 * PAGE], segment_name(1): [PAGE, end]}
    faults = summarise(FolderDump(files), ALL, verify=True).damage
    assert {(damage.file, damage.text.partition(";")[0]) for damage in faults} == {
        (segment_name(1), f"the disk cannot read byte {PAGE}"),
        (segment_name(1), f"the disk cannot read byte {end}"),
        (damaged, f"the disk cannot read byte {2 * PAGE}"),
    }
