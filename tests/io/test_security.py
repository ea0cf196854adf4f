"""The access file and the certificates of the settings: loading, reloading, and refusal of invalid ones."""

from __future__ import annotations

import logging
import ssl
import subprocess
from pathlib import Path

import pytest
from tests.accounts import access_file
from tests.certificates import certificate

from timeball.io.security import OPEN, Security, load_client_tls, load_peer_tls, load_tls
from timeball.model.access import Access, Verb
from timeball.model.config import Settings
from timeball.model.errors import SetupError, Unauthorized

ONE = '[[accounts]]\naccess_key = "one"\nsecret_key = "secret of one"\n'


def lets_in(access: Access | None, pair: str) -> bool:
    """Check whether the accounts accept these credentials, `access key:secret key`."""
    assert access is not None
    try:
        return access.authenticate({"authorization": f"Bearer {pair}"}, 0).may(Verb.LOOK)
    except Unauthorized:
        return False


def test_without_an_access_file_every_caller_is_accepted() -> None:
    assert (OPEN.access, OPEN.tls) == (None, None)
    OPEN.reload()
    assert Security(Settings()).access is None


def test_access_file_and_certificate_of_the_settings_are_loaded(tmp_path: Path) -> None:
    pem_files = certificate(tmp_path)
    security = Security(Settings(access_file=str(access_file(tmp_path, ONE)), **pem_files.settings))
    assert lets_in(security.access, "one:secret of one") and security.tls is not None


def test_status_counts_refused_requests(tmp_path: Path) -> None:
    security = Security(Settings(access_file=str(access_file(tmp_path, ONE))))
    assert OPEN.status() == {"accounts": 0, "refused": 0}
    lets_in(security.access, "one:secret of one")
    assert security.status() == {"accounts": 1, "refused": 0}
    for pair in ("one:wrong", "two:secret of one", ":"):
        lets_in(security.access, pair)
    assert security.status() == {"accounts": 1, "refused": 3}


def test_access_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    path.chmod(0o640)
    with pytest.raises(SetupError, match=r"--access-file .*others may read it"):
        Security(Settings(access_file=str(path)))


def test_reload_reads_the_access_file_again(tmp_path: Path) -> None:
    path = access_file(tmp_path, ONE)
    security = Security(Settings(access_file=str(path)))
    path.write_text(ONE.replace("one", "two"))
    assert not lets_in(security.access, "two:secret of two")
    security.reload()
    assert lets_in(security.access, "two:secret of two") and not lets_in(security.access, "one:secret of one")


def test_reload_of_an_invalid_file_keeps_the_accounts_and_logs_the_error(
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


def test_certificate_and_key_are_loaded_with_tls_1_2(tmp_path: Path) -> None:
    pem_files = certificate(tmp_path)
    tls = load_tls(pem_files.cert, pem_files.key)
    assert tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.http.minimum_version == ssl.TLSVersion.TLSv1_2
    assert "PRIVATE" not in repr(tls)


def test_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    pem_files = certificate(tmp_path)
    Path(pem_files.key).chmod(0o644)
    with pytest.raises(SetupError, match=r"--tls-key .*others may read it"):
        load_tls(pem_files.cert, pem_files.key)


@pytest.mark.parametrize("swapped", ["cert", "key"])
def test_key_of_another_certificate_is_refused(tmp_path: Path, swapped: str) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    mixed = one._replace(**{swapped: getattr(other, swapped)})
    with pytest.raises(SetupError, match=r"--tls-cert"):
        load_tls(mixed.cert, mixed.key)


@pytest.mark.parametrize("content", [b"", b"no PEM", b"\xff\x00"])
def test_files_without_a_certificate_are_refused_with_the_option(tmp_path: Path, content: bytes) -> None:
    pem_files = certificate(tmp_path)
    Path(pem_files.cert).write_bytes(content)
    with pytest.raises(SetupError, match=r"--tls-cert"):
        load_tls(pem_files.cert, pem_files.key)
    with pytest.raises(SetupError, match=r"--tls-key .*No such file"):
        load_tls(pem_files.cert, str(tmp_path / "gone"))


def test_key_with_a_password_is_refused_without_a_prompt(tmp_path: Path) -> None:
    pem_files, locked = certificate(tmp_path), tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", pem_files.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)],
        check=True,
    )
    locked.chmod(0o600)
    with pytest.raises(SetupError, match="password"):
        load_tls(pem_files.cert, str(locked))


def test_client_trusts_the_ca_and_presents_its_certificate(tmp_path: Path) -> None:
    pem_files = certificate(tmp_path)
    for context in (
        load_client_tls(pem_files.roots, "", ""),
        load_client_tls(pem_files.roots, pem_files.cert, pem_files.key),
    ):
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
        assert len(context.get_ca_certs()) == 1, "and not those of the system"
    assert load_client_tls("", "", "").verify_mode is ssl.CERT_REQUIRED


def test_an_unusable_replication_ca_is_named(tmp_path: Path) -> None:
    pem_files = certificate(tmp_path / "one")
    with pytest.raises(SetupError, match=r"^replication: CA .*none\.pem"):
        load_peer_tls(str(tmp_path / "none.pem"), pem_files.cert, pem_files.key)


def test_unusable_client_certificate_is_named(tmp_path: Path) -> None:
    pem_files, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    Path(open_key := str(tmp_path / "open.pem")).write_bytes(Path(pem_files.key).read_bytes())
    Path(open_key).chmod(0o644)
    for files, name_in_error in [
        ((str(tmp_path / "none.pem"), "", ""), "none.pem"),
        ((pem_files.key, "", ""), pem_files.key),  # no certificate in it
        ((pem_files.roots, pem_files.cert, ""), "both"),
        ((pem_files.roots, "", pem_files.key), "both"),
        ((pem_files.roots, pem_files.cert, other.key), other.key),
        ((pem_files.roots, pem_files.cert, open_key), "others may read it"),
    ]:
        with pytest.raises(SetupError, match="etcd") as caught:
            load_client_tls(*files)
        assert name_in_error in str(caught.value)
