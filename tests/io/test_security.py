"""What the settings name is loaded, and loaded again; what is not sound never lets anybody in."""

from __future__ import annotations

import logging
import ssl
import subprocess
from pathlib import Path

import pytest
from tests.accounts import access_file
from tests.certificates import certificate

from timeball.io.security import OPEN, Security, load_client_tls, load_tls
from timeball.model.access import Access, Verb
from timeball.model.config import Settings
from timeball.model.errors import SetupError, Unauthorized

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
    assert Security(Settings()).access is None


def test_what_the_settings_name_is_loaded(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    security = Security(Settings(access_file=str(access_file(tmp_path, ONE)), **made.settings))
    assert lets_in(security.access, "one:secret of one") and security.tls is not None


def test_who_watches_the_broker_sees_who_was_not_let_in(tmp_path: Path) -> None:
    security = Security(Settings(access_file=str(access_file(tmp_path, ONE))))
    assert OPEN.status() == {"accounts": 0, "refused": 0}
    lets_in(security.access, "one:secret of one")
    assert security.status() == {"accounts": 1, "refused": 0}
    for pair in ("one:wrong", "two:secret of one", ":"):
        lets_in(security.access, pair)
    assert security.status() == {"accounts": 1, "refused": 3}


def test_a_file_that_others_may_read(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    path.chmod(0o640)
    with pytest.raises(SetupError, match=r"--access-file .*others may read it"):
        Security(Settings(access_file=str(path)))


def test_it_is_read_again_when_told_so(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    security = Security(Settings(access_file=str(path)))
    path.write_text(ONE.replace("one", "two"))
    assert not lets_in(security.access, "two:secret of two")
    security.reload()
    assert lets_in(security.access, "two:secret of two") and not lets_in(security.access, "one:secret of one")


def test_a_file_that_is_not_sound_any_more_changes_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = access_file(tmp_path, ONE)
    security = Security(Settings(access_file=str(path)))
    for breach in (lambda: path.write_text("accounts = 1"), lambda: path.chmod(0o644), path.unlink):
        breach()
        with caplog.at_level(logging.ERROR):
            caplog.clear()
            security.reload()
        assert "--access-file" in caplog.text and "secret of one" not in caplog.text
        assert lets_in(security.access, "one:secret of one")


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    found = load_tls(made.cert, made.key)
    assert found.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert found.http.minimum_version == ssl.TLSVersion.TLSv1_2
    assert "PRIVATE" not in repr(found)


def test_a_key_that_everybody_may_read(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    Path(made.key).chmod(0o644)
    with pytest.raises(SetupError, match=r"--tls-key .*others may read it"):
        load_tls(made.cert, made.key)


@pytest.mark.parametrize("swapped", ["cert", "key"])
def test_a_certificate_and_another_s_key(tmp_path: Path, swapped: str) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    mixed = one._replace(**{swapped: getattr(other, swapped)})
    with pytest.raises(SetupError, match=r"--tls-cert"):
        load_tls(mixed.cert, mixed.key)


@pytest.mark.parametrize("content", [b"", b"no PEM", b"\xff\x00"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    made = certificate(tmp_path)
    Path(made.cert).write_bytes(content)
    with pytest.raises(SetupError, match=r"--tls-cert"):
        load_tls(made.cert, made.key)
    with pytest.raises(SetupError, match=r"--tls-key .*No such file"):
        load_tls(made.cert, str(tmp_path / "gone"))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    made, locked = certificate(tmp_path), tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", made.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)],
        check=True,
    )
    locked.chmod(0o600)
    with pytest.raises(SetupError, match="password"):
        load_tls(made.cert, str(locked))


def test_a_server_is_trusted_by_its_authority_and_shown_a_certificate(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    for context in (load_client_tls(made.roots, "", ""), load_client_tls(made.roots, made.cert, made.key)):
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
        assert len(context.get_ca_certs()) == 1, "and not those of the system"
    assert load_client_tls("", "", "").verify_mode is ssl.CERT_REQUIRED


def test_what_cannot_be_shown_to_a_server_is_named(tmp_path: Path) -> None:
    made, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    Path(open_key := str(tmp_path / "open.pem")).write_bytes(Path(made.key).read_bytes())
    Path(open_key).chmod(0o644)
    for files, named in [
        ((str(tmp_path / "none.pem"), "", ""), "none.pem"),
        ((made.key, "", ""), made.key),  # no certificate in it
        ((made.roots, made.cert, ""), "both"),
        ((made.roots, "", made.key), "both"),
        ((made.roots, made.cert, other.key), other.key),
        ((made.roots, made.cert, open_key), "others may read it"),
    ]:
        with pytest.raises(SetupError, match="etcd") as caught:
            load_client_tls(*files)
        assert named in str(caught.value)
