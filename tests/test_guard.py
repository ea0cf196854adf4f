"""What the settings name is loaded, and loaded again; what is not sound never lets anybody in."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.accounts import access_file
from tests.certificates import certificate

from timeball.access import Access, Verb
from timeball.config import Settings
from timeball.errors import SetupError, Unauthorized
from timeball.guard import OPEN, Guard

ONE = '[[accounts]]\naccess_key = "one"\nsecret_key = "secret of one"\n'


def lets_in(access: Access | None, pair: str) -> bool:
    assert access is not None
    try:
        return access.authenticate({"authorization": f"Bearer {pair}"}, 0).may(Verb.LOOK)
    except Unauthorized:
        return False


def test_without_settings_everybody_may_come_in() -> None:
    assert (OPEN.access, OPEN.tls) == (None, None)
    OPEN.reload()
    assert Guard(Settings()).access is None


def test_what_the_settings_name_is_loaded(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    guard = Guard(Settings(access_file=str(access_file(tmp_path, ONE)), **made.settings))
    assert lets_in(guard.access, "one:secret of one") and guard.tls is not None


def test_who_watches_the_broker_sees_who_was_not_let_in(tmp_path: Path) -> None:
    guard = Guard(Settings(access_file=str(access_file(tmp_path, ONE))))
    assert OPEN.status() == {"accounts": 0, "refused": 0}
    lets_in(guard.access, "one:secret of one")
    assert guard.status() == {"accounts": 1, "refused": 0}
    for pair in ("one:wrong", "two:secret of one", ":"):
        lets_in(guard.access, pair)
    assert guard.status() == {"accounts": 1, "refused": 3}


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    path.chmod(0o640)
    with pytest.raises(SetupError, match=r"--access-file .*others may read it"):
        Guard(Settings(access_file=str(path)))


def test_it_is_read_again_when_told_so(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    guard = Guard(Settings(access_file=str(path)))
    path.write_text(ONE.replace("one", "two"))
    assert not lets_in(guard.access, "two:secret of two")
    guard.reload()
    assert lets_in(guard.access, "two:secret of two") and not lets_in(guard.access, "one:secret of one")


def test_a_file_that_is_not_sound_any_more_changes_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = access_file(tmp_path, ONE)
    guard = Guard(Settings(access_file=str(path)))
    for breach in (lambda: path.write_text("accounts = 1"), lambda: path.chmod(0o644), path.unlink):
        breach()
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            guard.reload()
        assert "--access-file" in caplog.text and "secret of one" not in caplog.text
        assert lets_in(guard.access, "one:secret of one")
