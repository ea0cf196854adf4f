"""The crash model loses all data that a disk may lose, and keeps all that it must, or tests with it prove nothing."""

from __future__ import annotations

import pytest
from tests.crash_files import CrashFiles, PowerCut
from tests.crash_images import SEEDS, images, synced_file

# ---- content ---------------------------------------------------------------------------------------------


def test_synced_content_survives_every_cut() -> None:
    files = CrashFiles()
    synced_file(files, "a", b"kept" * 1000)
    assert images(files, "a") == {b"kept" * 1000}


def test_forgotten_syncs_lose_content_and_names() -> None:
    files = CrashFiles(forget_sync=True)
    synced_file(files, "a", b"kept" * 1000)
    assert files.crash(survival="nothing").content("a") == b""
    assert len(images(files, "a")) > 3
    files = CrashFiles(forget_sync_dir=True)
    synced_file(files, "a", b"kept" * 1000)
    assert images(files, "a") == {None, b"kept" * 1000}
    assert files.crash().forget_sync_dir


def test_unsynced_blocks_are_old_or_new_one_by_one() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"o" * 512 * 8)
    file.write_at(0, b"n" * 512 * 8)
    assert files.crash(survival="nothing").content("a") == b"o" * 512 * 8
    assert files.crash(survival="everything").content("a") == b"n" * 512 * 8
    states = images(files, "a")
    patterns = set()
    for image in states:
        assert image is not None
        blocks = [image[begin : begin + 512] for begin in range(0, len(image), 512)]
        assert set(blocks) <= {b"o" * 512, b"n" * 512}
        patterns.add("".join(chr(block[0]) for block in blocks))
    assert {"o" * 8, "n" * 8} < patterns
    assert any("on" in pattern for pattern in patterns) and any("no" in pattern for pattern in patterns)


def test_a_new_size_may_survive_without_its_content() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"x")
    file.write_at(1, b"y" * 2000)
    assert {b"x", b"x" + bytes(2000), b"x" + b"y" * 2000} <= images(files, "a")


def test_bytes_beyond_the_surviving_size_do_not_come_back() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"x")
    file.write_at(1, b"y" * 2000)
    for seed in SEEDS:
        after = files.crash(seed)
        size = after.size("a")
        after.open("a").allocate(3000)
        assert after.content("a")[size:] == bytes(3000 - size)


def test_an_unsynced_truncation_may_be_undone() -> None:
    files = CrashFiles()
    synced_file(files, "a", b"x" * 2000)
    files.create("a")
    assert files.size("a") == 0
    assert files.crash(survival="nothing").content("a") == b"x" * 2000
    assert files.crash(survival="everything").content("a") == b""


def test_stores_through_a_mapping_are_in_flight_until_synced() -> None:
    files = CrashFiles()
    file = files.create("a")
    file.allocate(4096)
    view = file.map()
    file.sync()
    files.sync_dir(".")
    view[:4096] = b"1" * 4096
    assert files.crash(survival="nothing").content("a") == bytes(4096)
    assert len(images(files, "a")) > 3
    file.sync()
    view[:512] = b"2" * 512
    assert images(files, "a") == {b"1" * 4096, b"2" * 512 + b"1" * 3584}


def test_the_same_seed_gives_the_same_image() -> None:
    files = CrashFiles()
    synced_file(files, "a", bytes(100_000)).write_at(0, b"n" * 100_000)
    first, second = ([files.crash(seed).content("a") for seed in range(9)] for _ in range(2))
    assert first == second


def test_an_image_is_a_disk_of_its_own() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"old")
    after = files.crash()
    file.write_at(0, b"new")
    after.open("a").write_at(0, b"own")
    assert (files.content("a"), after.content("a")) == (b"new", b"own")
    assert after.crash(survival="nothing").content("a") == b"old"


# ---- names -----------------------------------------------------------------------------------------------


def test_a_synced_file_without_a_synced_name_may_be_lost() -> None:
    files = CrashFiles()
    file = files.create("a")
    file.write_at(0, b"data")
    file.sync()
    assert images(files, "a") == {None, b"data"}


def test_a_removed_file_may_be_back_with_its_content() -> None:
    files = CrashFiles()
    synced_file(files, "a", b"zombie")
    files.remove("a")
    assert images(files, "a") == {None, b"zombie"}
    files.sync_dir(".")
    assert images(files, "a") == {None}


def test_names_are_lost_independently_but_one_name_keeps_its_order() -> None:
    files = CrashFiles()
    files.create("a")
    files.create("b")
    listings = {tuple(files.crash(seed).list_dir(".")) for seed in SEEDS}
    assert listings == {(), ("a",), ("b",), ("a", "b")}
    files = CrashFiles()
    files.create("a")
    files.remove("a")
    files.create("a").write_at(0, b"")
    assert {tuple(files.crash(seed).list_dir(".")) for seed in SEEDS} == {(), ("a",)}


def test_an_operation_is_not_kept_when_an_earlier_one_on_its_name_is_lost() -> None:
    files = CrashFiles(forget_sync_dir=True)
    files.replace("s", b"1")
    files.replace("s", b"2")
    contents = set()
    for seed in SEEDS:
        after = files.crash(seed)
        contents.add(tuple((name, after.content(name)) for name in after.list_dir(".")))
    assert contents == {
        (),
        (("s.new", b"1"),),
        (("s", b"1"),),
        (("s", b"1"), ("s.new", b"2")),
        (("s", b"2"),),
    }


def test_replace_is_atomic_at_each_of_its_five_cut_points() -> None:
    kinds = []
    for cut in range(1, 6):
        files = CrashFiles()
        files.replace("state", b"old")
        files.crash_at = files.calls + cut
        with pytest.raises(PowerCut, match="power cut at call"):
            files.replace("state", b"new")
        kinds.append(files.trace[-1][0])
        states = images(files, "state")
        assert states <= {b"old", b"new"} and b"old" in states
        assert (b"new" in states) == (cut >= 4), f"cut at {files.trace[-1]}"
    assert kinds == ["create", "write_at", "sync", "rename", "sync_dir"]


def test_a_rename_without_a_content_sync_may_leave_an_empty_file() -> None:
    files = CrashFiles(forget_sync=True)
    files.replace("state", b"new")
    assert b"" in images(files, "state")


def test_made_folders_are_durable_and_a_cut_on_the_way_may_lose_them() -> None:
    files = CrashFiles()
    files.make_dir("x/y")
    assert files.crash(survival="nothing").exists("x/y")
    assert [call for call, _ in files.trace] == ["mkdir", "sync_dir", "mkdir", "sync_dir"]
    for cut, listings in ((1, {()}), (2, {()}), (3, {("x",)}), (4, {("x",)})):
        files = CrashFiles(crash_at=cut)
        with pytest.raises(PowerCut):
            files.make_dir("x/y")
        after = files.crash(survival="nothing")
        assert {tuple(after.list_dir("."))} == listings and not after.exists("x/y")


def test_a_lost_folder_takes_its_files_along() -> None:
    files = CrashFiles(forget_sync_dir=True)
    files.make_dir("x")
    synced_file(files, "x/a", b"data")
    assert images(files, "x/a") >= {None, b"data"}
