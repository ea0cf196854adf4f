"""Cuts, faults and threads of the crash model, and its properties for any sequence of calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.crash_files import CrashFiles, PowerCut, Survival
from tests.crash_images import images, synced_file

from timeball.io.files import File, Files
from timeball.model.errors import DiskFailed, OverLimit


def test_crash_files_implement_the_interface() -> None:
    files: Files = CrashFiles()
    file: File = files.create("a")
    file.close()


# ---- cuts and faults -------------------------------------------------------------------------------------


def scenario(files: CrashFiles) -> None:
    """Use every call that changes something."""
    files.make_dir("log")
    file = files.create("log/0")
    file.allocate(4096)
    file.sync()
    files.sync_dir("log")
    file.write_at(0, b"frame")
    file.sync()
    files.sync_file("log/0")
    files.replace("checkpoint", b"1")
    files.absorb("log")
    files.remove("log/0")
    files.sync_dir("log")


def test_every_changing_call_is_a_cut_point_and_nothing_works_after_it() -> None:
    whole = CrashFiles()
    scenario(whole)
    assert whole.calls == len(whole.trace) == 17
    for cut in range(1, whole.calls + 1):
        files = CrashFiles(crash_at=cut)
        with pytest.raises(PowerCut):
            scenario(files)
        assert (files.calls, files.trace) == (cut, whole.trace[:cut])
        for call in (files.list_dir, files.exists, files.create, files.remove, files.external):
            with pytest.raises(PowerCut):
                call("a")
        assert files.calls == cut
        files.crash(cut).list_dir(".")


def test_a_power_cut_is_not_an_exception() -> None:
    assert not issubclass(PowerCut, Exception)


def test_a_cut_at_a_sync_comes_before_its_effect_and_at_a_write_after_it() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"old")
    files.crash_at = files.calls + 1
    with pytest.raises(PowerCut):
        file.write_at(0, b"new")
    file.close()
    assert images(files, "a") == {b"old", b"new"}
    files = CrashFiles()
    file = synced_file(files, "a", b"old")
    file.write_at(0, b"new")
    files.crash_at = files.calls + 1
    with pytest.raises(PowerCut):
        file.sync()
    assert images(files, "a") == {b"old", b"new"}


def test_a_fault_occurs_once_or_until_it_is_healed() -> None:
    files = CrashFiles()
    file = files.create("a")
    files.fail_at(2, DiskFailed("injected"))
    with pytest.raises(DiskFailed, match="injected"):
        file.write_at(0, b"abcd")
    assert files.content("a") == b"ab"
    file.write_at(0, b"abcd")
    files.fail_at(files.calls + 2, DiskFailed("injected"), forever=True)
    files.sync_dir(".")
    for call in (lambda: files.create("b"), file.sync, lambda: files.remove("a")):
        with pytest.raises(DiskFailed):
            call()
    assert files.list_dir(".") == ["a"]
    files.heal()
    files.remove("a")


def test_a_full_disk_stops_only_what_takes_space() -> None:
    files = CrashFiles()
    file = files.create("a")
    file.allocate(1000)
    files.fail_at(1, OverLimit("disk full"), forever=True)
    file.write_at(0, b"x" * 1000)
    file.sync()
    files.sync_dir(".")
    for call in (
        lambda: file.write_at(999, b"xx"),
        lambda: file.allocate(2000),
        lambda: files.create("b"),
        lambda: files.make_dir("x"),
        lambda: files.replace("a", b""),
    ):
        with pytest.raises(OverLimit):
            call()
    assert files.size("a") == 1000
    file.allocate(10)
    files.remove("a")


def test_a_second_sync_does_not_repair_a_failed_one() -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"old")
    file.write_at(0, b"new")
    files.fail_at(files.calls + 1, DiskFailed("injected"))
    with pytest.raises(DiskFailed):
        file.sync()
    assert files.syncs_after_failure == []
    file.sync()
    assert files.syncs_after_failure == ["a"]
    assert files.crash(survival="nothing").content("a") == b"old"


def test_several_threads_may_use_it() -> None:
    files = CrashFiles()
    file = files.create("a")
    file.allocate(80_000)
    ends: list[BaseException | None] = []

    def run(work: Callable[[int], object]) -> None:
        try:
            for number in range(2000):
                work(number)
            ends.append(None)
        except PowerCut as cut:
            ends.append(cut)

    files.crash_at = files.calls + 3000
    works: list[Callable[[int], object]] = [
        lambda number: file.write_at(number * 20, b"%020d" % number),
        lambda number: file.sync(),
        lambda number: files.map_readonly("a"),
        lambda number: files.crash(number) if number % 100 == 0 else files.exists("a"),
    ]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 4 and files.calls == files.crash_at
    assert sum(isinstance(end, PowerCut) for end in ends) >= 1


# ---- properties ------------------------------------------------------------------------------------------


writes = st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=2000)), max_size=6)


@given(before=writes, after=writes, seed=st.integers(0, 2**32))
def test_each_block_of_an_image_is_the_synced_or_the_current_one(
    before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], seed: int
) -> None:
    files = CrashFiles()
    file = synced_file(files, "a", b"start")
    for offset, data in before:
        file.write_at(offset, data)
    file.sync()
    durable = files.content("a")
    for offset, data in after:
        file.write_at(offset, data)
    current = files.content("a")
    assert files.crash(survival="nothing").content("a") == durable
    assert files.crash(survival="everything").content("a") == current
    image = files.crash(seed).content("a")
    assert len(durable) <= len(image) <= len(current)
    padded = durable + bytes(len(current) - len(durable))
    for begin in range(0, len(image), 512):
        end = min(begin + 512, len(image))
        assert image[begin:end] in (padded[begin:end], current[begin:end])


class Disk(RuleBasedStateMachine):
    """Any calls, with cuts in between, compared with a plain model of the current and the durable content."""

    names = st.sampled_from(["a", "b", "d/c"])

    def __init__(self) -> None:
        super().__init__()
        self.files = CrashFiles()
        self.files.make_dir("d")
        self.now: dict[str, bytes] = {}
        self.synced: dict[str, bytes] = {}  # content synced, name synced, untouched since: must survive

    def content(self) -> dict[str, bytes]:
        """Read all files."""
        return {name: self.files.content(name) for name in ("a", "b", "d/c") if self.files.exists(name)}

    @rule(name=names, data=st.binary(max_size=1500))
    def replace(self, name: str, data: bytes) -> None:
        self.files.replace(name, data)
        self.now[name] = self.synced[name] = data

    @rule(name=names, size=st.integers(0, 2000))
    def create(self, name: str, size: int) -> None:
        self.files.create(name).allocate(size)
        self.now[name] = bytes(size)
        self.synced.pop(name, None)

    @rule(name=names, offset=st.integers(0, 1500), data=st.binary(min_size=1, max_size=600))
    def write(self, name: str, offset: int, data: bytes) -> None:
        if name in self.now:
            self.files.open(name).write_at(offset, data)
            old = self.now[name].ljust(offset, b"\0")
            self.now[name] = old[:offset] + data + old[offset + len(data) :]
            self.synced.pop(name, None)

    @rule(name=names, shrink=st.integers(0, 3000))
    def allocate(self, name: str, shrink: int) -> None:
        if name in self.now:
            self.files.open(name).allocate(shrink)
            self.now[name] = self.now[name][:shrink].ljust(shrink, b"\0")
            self.synced.pop(name, None)

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.files.remove(name)
        self.now.pop(name, None)
        self.synced.pop(name, None)

    @rule(name=names)
    def sync(self, name: str) -> None:
        if name in self.now:
            self.files.sync_file(name)
            self.files.sync_dir("d" if "/" in name else ".")
            self.synced[name] = self.now[name]

    @rule(name=names)
    def keep_a_mapping(self, name: str) -> None:
        if self.now.get(name):
            view = self.files.open(name).map()
            view[0] = 7
            self.now[name] = b"\7" + self.now[name][1:]
            self.synced.pop(name, None)

    @precondition(lambda self: self.now)
    @rule(seed=st.integers(0, 2**32), survival=st.sampled_from(["nothing", "everything", "random"]))
    def cut(self, seed: int, survival: Survival) -> None:
        before, self.files = self.files, self.files.crash(seed, survival)
        for name, data in self.synced.items():
            assert self.files.content(name) == data, (name, before.trace)
        kept = self.content()
        if survival == "everything":
            assert kept == self.now
        self.now, self.synced = kept, dict(kept)

    @invariant()
    def programs_see_what_they_wrote(self) -> None:
        assert self.content() == self.now


TestDisk = Disk.TestCase
TestDisk.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(records=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8), data=st.data())
@settings(max_examples=60)
def test_an_honest_log_keeps_its_acknowledged_records_and_one_without_syncs_does_not(
    records: list[bytes], data: st.DataObject
) -> None:
    """The loop of all crash tests on a small scale, with its negative control."""

    def append_all(files: CrashFiles, acked: list[bytes]) -> None:
        file = files.create("log")
        files.sync_dir(".")
        end = 0
        for record in records:
            file.write_at(end, record)
            file.sync()
            end += len(record)
            acked.append(record)

    whole = CrashFiles()
    append_all(whole, [])
    cut = data.draw(st.integers(1, whole.calls))
    files = CrashFiles(crash_at=cut)
    acked: list[bytes] = []
    with pytest.raises(PowerCut):
        append_all(files, acked)
    for seed in range(5):
        after = files.crash(seed)
        assert not acked or after.content("log").startswith(b"".join(acked))
    control = CrashFiles(forget_sync=True)
    append_all(control, [])
    assert control.crash(survival="nothing").content("log") == b""


def test_the_cost_of_an_image_depends_on_the_dirty_bytes_only() -> None:
    """A ratio, not a time: 64 MiB that are allocated and synced cost about as much as 1 MiB."""

    def cost(size: int) -> float:
        """Return the shortest time of an image with one dirty page."""
        files = CrashFiles()
        file = files.create("a")
        file.allocate(size)
        file.write_at(0, np.full(4096, 7, dtype=np.uint8).tobytes())
        file.sync()
        files.sync_dir(".")
        file.write_at(0, b"x" * 4096)
        best = float("inf")
        for seed in range(30):
            start = time.perf_counter()
            files.crash(seed)
            best = min(best, time.perf_counter() - start)
        return best

    assert cost(64 << 20) < 20 * cost(1 << 20)
