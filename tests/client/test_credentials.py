"""Credentials: from the caller or the environment, complete or refused, and never shown."""

from pathlib import Path

import pytest

from timeball import RequestError, Timeball
from timeball.client.credentials import ACCESS_KEY, SECRET_KEY, TLS_NAME, TLS_ROOTS, Credentials, credentials


def test_nothing_is_said_unless_somebody_says_so() -> None:
    assert credentials() == Credentials()


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ACCESS_KEY, "a")
    monkeypatch.setenv(SECRET_KEY, "b")
    (tmp_path / "roots").write_bytes(b"PEM")
    monkeypatch.setenv(TLS_ROOTS, str(tmp_path / "roots"))
    monkeypatch.setenv(TLS_NAME, "broker.example")
    assert credentials() == Credentials("a", "b", b"PEM", "broker.example")
    assert credentials("c", "d", b"X") == Credentials("c", "d", b"X", "broker.example")


def test_missing_and_invalid_values_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="secret_key"):
        credentials("a")
    with pytest.raises(RequestError, match="access_key"):
        Timeball(secret_key="b")
    with pytest.raises(RequestError, match="ASCII"):
        credentials("a", "b\nc")
    with pytest.raises(RequestError, match="ASCII"):
        credentials("a", "sch\u00fctz")
    monkeypatch.setenv(TLS_ROOTS, str(tmp_path / "gone"))
    with pytest.raises(RequestError, match=TLS_ROOTS):
        credentials()
    monkeypatch.setenv(ACCESS_KEY, "a")
    with pytest.raises(RequestError, match=f"{SECRET_KEY} is not"):
        credentials()


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(credentials("a", "hidden"))


def test_keys_are_one_header() -> None:
    assert credentials("a", "b").authorization == "Bearer a:b" and credentials().authorization == ""
