"""Credentials: from the caller or the environment, complete or refused, and never shown."""

from pathlib import Path

import pytest

from timeball import RequestError, Timeball
from timeball.client.credentials import ACCESS_KEY, SECRET_KEY, TLS_NAME, TLS_ROOTS, Credentials, credentials


def test_without_arguments_and_variables_the_credentials_are_empty() -> None:
    assert credentials() == Credentials()


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ACCESS_KEY, "a")
    monkeypatch.setenv(SECRET_KEY, "b")
    (tmp_path / "roots").write_bytes(b"PEM")
    monkeypatch.setenv(TLS_ROOTS, str(tmp_path / "roots"))
    monkeypatch.setenv(TLS_NAME, "broker.example")
    assert credentials() == Credentials("a", "b", b"PEM", "broker.example")
    assert credentials("c", "d", b"X") == Credentials("c", "d", b"X", "broker.example")


def test_incomplete_or_invalid_credentials_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_the_repr_does_not_contain_the_secret_key() -> None:
    assert "hidden" not in repr(credentials("a", "hidden"))


def test_both_keys_are_sent_in_one_header() -> None:
    assert credentials("a", "b").authorization == "Bearer a:b" and credentials().authorization == ""
