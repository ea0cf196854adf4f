"""The limit of descriptors: raised as far as possible, refused if too low, with a reserve for own files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from timeball.io.files import (
    OPEN_FILES_MAX,
    OPEN_FILES_MIN,
    RESERVE,
    RealFiles,
    lent,
    open_files_max,
    raise_open_files_limit,
)
from timeball.model.errors import SetupError


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """Read the soft and the hard limit of descriptors, and restore them after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def count_open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_soft_limit_is_raised_and_the_reserve_is_kept_back(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    raise_open_files_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == limits[1]
    assert soft == max(min(hard, OPEN_FILES_MAX), limits[0] - 1) - RESERVE == open_files_max()


def test_a_hard_limit_below_the_minimum_is_a_set_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, OPEN_FILES_MIN - 1))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(SetupError, match="may open 255 files and a broker needs 256: raise the limit"):
        raise_open_files_limit()


def test_lent_descriptors_last_until_the_last_loan_ends(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    with lent(10):
        assert open_files_max() == 510
        with lent(30):
            assert open_files_max() == 530
        assert open_files_max() == 510
    assert open_files_max() == 500


def test_own_files_are_opened_when_connections_have_all_descriptors(
    tmp_path: Path, limits: tuple[int, int]
) -> None:
    """The control: a plain `open` fails while a thread takes each descriptor that becomes free."""
    files = RealFiles(tmp_path)
    files.replace("a", b"0123456789")
    stop, descriptors = threading.Event(), list[int]()

    def take_descriptors() -> None:
        while not stop.is_set():
            try:
                descriptors.append(os.dup(0))
            except OSError:
                stop.wait(0.001)

    resource.setrlimit(resource.RLIMIT_NOFILE, (count_open_descriptors() + 200, limits[1]))
    thread = threading.Thread(target=take_descriptors)
    thread.start()
    try:
        while len(descriptors) < 150:
            stop.wait(0.01)
        with pytest.raises(OSError, match="Too many open files"):
            for _ in range(50):
                (tmp_path / "a").open("rb").close()
                stop.wait(0.002)
        for number in range(20):
            file = files.create(f"segment-{number}")
            file.write_at(0, b"x")
            file.sync()
            files.sync_dir(".")
            file.close()
            files.replace("state", b"y")
            assert bytes(files.map_readonly("a")) == b"0123456789"
    finally:
        stop.set()
        thread.join()
        for fd in descriptors:
            os.close(fd)
