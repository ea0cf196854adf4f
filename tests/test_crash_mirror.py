"""A library works in a real folder of the crash model, which may lose its writes like those of Timeball."""

from __future__ import annotations

import gc
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from tests.crash_files import CrashFiles
from tests.crash_images import images

# ---- a library's own folder ------------------------------------------------------------------------------


def test_writes_of_a_library_are_in_flight_until_synced() -> None:
    files = CrashFiles()
    files.make_dir("table")
    path = Path(files.external("table"))
    (path / "a").write_bytes(b"a" * 600)
    files.absorb("table")
    assert images(files, "table/a") >= {None, b"", b"a" * 600}
    files.sync_file("table/a")
    files.sync_dir("table")
    assert images(files, "table/a") == {b"a" * 600}
    with (path / "a").open("r+b") as file:
        file.write(b"b" * 10)
    (path / "b").write_bytes(b"b")
    files.absorb("table")
    assert files.content("table/a") == b"b" * 10 + b"a" * 590
    assert images(files, "table/a") == {b"a" * 600, b"b" * 10 + b"a" * 590}
    (path / "a").unlink()
    (path / "c").write_bytes(b"c")
    (path / "c").rename(path / "b")
    files.absorb("table")
    assert files.list_dir("table") == ["b"]
    assert images(files, "table/a") >= {None, b"a" * 600}
    assert images(files, "table/b") >= {None, b"c"}


def test_a_library_may_make_the_folder_itself() -> None:
    files = CrashFiles()
    path = Path(files.external("new/table"))
    files.absorb("new/table")
    assert not files.exists("new/table")
    (path / "part").mkdir(parents=True)
    (path / "part" / "a").write_bytes(b"a")
    files.absorb("new/table")
    assert files.content("new/table/part/a") == b"a"
    assert not files.crash(survival="nothing").exists("new")
    files.create("new/table/b").write_at(0, b"b")
    assert (path / "b").read_bytes() == b"b"


def test_an_image_has_its_own_external_folder_and_cleans_it_up() -> None:
    files = CrashFiles()
    files.make_dir("table")
    path = Path(files.external("table"))
    (path / "lost").write_bytes(b"never absorbed")
    after = files.crash(survival="nothing")
    other = Path(after.external("table"))
    assert other != path and list(other.iterdir()) == []
    assert files.crash(survival="everything").content("table/lost") == b"never absorbed"
    files.close()
    assert not path.exists()
    del after
    gc.collect()
    assert not other.exists()


def test_the_external_folder_follows_every_change() -> None:
    files = CrashFiles()
    files.make_dir("t/sub")
    mapped = files.create("t/sub/m")
    mapped.allocate(10)
    view = mapped.map()
    path = Path(files.external("t"))
    file = files.create("t/a")
    file.write_at(3, b"abc")
    assert (path / "a").read_bytes() == b"\0\0\0abc"
    file.allocate(4)
    assert (path / "a").read_bytes() == b"\0\0\0a"
    files.replace("t/a", b"new")
    assert (path / "a").read_bytes() == b"new" and not (path / "a.new").exists()
    file.write_at(0, b"old inode")
    assert (path / "a").read_bytes() == b"new"
    files.make_dir("t/more")
    files.replace("t/more/x", b"x")
    assert (path / "more" / "x").read_bytes() == b"x"
    files.remove("t/a")
    assert not (path / "a").exists()
    view[:2] = b"hi"
    files.external("t")
    assert (path / "sub" / "m").read_bytes()[:2] == b"hi"
    files.absorb("t")
    assert files.content("t/sub/m")[:2] == b"hi"


def test_a_lost_commit_of_a_delta_table_leaves_the_version_before() -> None:
    files = CrashFiles()
    files.make_dir("pending")
    path = files.external("pending")

    def sync_tree(folder: str) -> None:
        """Sync all files and folders below a folder."""
        for name in files.list_dir(folder):
            inner = f"{folder}/{name}"
            sync_tree(inner) if files.list_dir(inner) else files.sync_file(inner)
        files.sync_dir(folder)

    write_deltalake(path, pa.table({"x": [1]}))
    files.absorb("pending")
    sync_tree("pending")
    table = DeltaTable(path)
    write_deltalake(table, pa.table({"x": [2]}), mode="append")
    files.absorb("pending")
    versions = set()
    for survival in ("nothing", "everything"):
        after = files.crash(survival=survival)
        survivor = DeltaTable(after.external("pending"))
        versions.add(survivor.version())
        assert survivor.to_pyarrow_table().num_rows == survivor.version() + 1
    assert versions == {0, 1}
    sync_tree("pending")
    for seed in range(5):
        assert DeltaTable(files.crash(seed).external("pending")).version() == 1
