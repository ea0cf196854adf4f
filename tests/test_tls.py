"""A certificate that cannot work ends the start, and says which option it is."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from tests.certificates import certificate

from timeball import tls
from timeball.errors import SetupError


def test_a_certificate_and_its_key(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    found = tls.load(made.cert, made.key)
    assert found.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert found.key == Path(made.key).read_bytes() and b"CERTIFICATE" in found.certificate
    assert "PRIVATE" not in repr(found)


def test_a_key_that_everybody_may_read(tmp_path: Path) -> None:
    made = certificate(tmp_path)
    Path(made.key).chmod(0o644)
    with pytest.raises(SetupError, match=r"--tls-key .*others may read it"):
        tls.load(made.cert, made.key)


@pytest.mark.parametrize("swapped", ["cert", "key"])
def test_a_certificate_and_another_s_key(tmp_path: Path, swapped: str) -> None:
    one, other = certificate(tmp_path / "one"), certificate(tmp_path / "other")
    mixed = one._replace(**{swapped: getattr(other, swapped)})
    with pytest.raises(SetupError, match=r"--tls-cert"):
        tls.load(mixed.cert, mixed.key)


@pytest.mark.parametrize("content", [b"", b"no PEM", b"\xff\x00"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    made = certificate(tmp_path)
    Path(made.cert).write_bytes(content)
    with pytest.raises(SetupError, match=r"--tls-cert"):
        tls.load(made.cert, made.key)
    with pytest.raises(SetupError, match=r"--tls-key .*No such file"):
        tls.load(made.cert, str(tmp_path / "gone"))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    made, locked = certificate(tmp_path), tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "pkey", "-in", made.key, "-aes256", "-passout", "pass:secret", "-out", str(locked)],
        check=True,
    )
    locked.chmod(0o600)
    with pytest.raises(SetupError, match="password"):
        tls.load(made.cert, str(locked))
