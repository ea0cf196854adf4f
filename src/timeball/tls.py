"""One certificate and its key, for all edges: as bytes for those that are gRPC, as a context for asyncio's.

It is read once, at the start, and checked there: a key of another certificate, or one that others may read, ends the
start with a sentence that names the option, and never a handshake at night.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from timeball.errors import SetupError
from timeball.files import read_secret

ANYBODY = 0o007  # a key's group may be one of its own, as Debian's ssl-cert


class Tls(NamedTuple):
    """What an edge needs to speak TLS, in PEM; `context` asks for TLS 1.2 or later."""

    certificate: bytes
    key: bytes
    context: ssl.SSLContext

    def __repr__(self) -> str:
        return "Tls(…)"


def load(certificate: str, key: str) -> Tls:
    """The certificate (with its chain) and key in these files; raises SetupError."""
    chain = read_secret(certificate, "--tls-cert", forbidden_mode=0)
    secret = read_secret(key, "--tls-key", forbidden_mode=ANYBODY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A function for the password: without one, a key that has one would be asked for at the terminal.
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise SetupError(
            f"--tls-cert {certificate}, --tls-key {key}: no certificate and its key in PEM, or a key with a password "
            f"({reason})"
        ) from error
    return Tls(chain, secret, context)


def _no_password() -> str:
    raise ValueError("a key with a password")
