"""The access file and the certificate that the settings name, loaded: which clients are let in, and over TLS or not.

One certificate and its key serve all edges, in two contexts: of those that speak HTTP/2, and of HTTP/1.1.

Both are read and checked when the broker starts: a key of another certificate, or one that others may read, ends the
start with a sentence that names the option, and never a handshake at night. The access file is read again when the
operator says so (SIGHUP); one that is not sound then is named in the broker's log, and changes nothing. A new
certificate needs a new start.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from timeball import access
from timeball.access import ANONYMOUS, Access, Accounts, Caller
from timeball.config import Settings
from timeball.errors import SetupError
from timeball.files import read_secret

ANYBODY = 0o007  # a key's group may be one of its own, as Debian's ssl-cert


class Tls(NamedTuple):
    """Certificate and key with which an edge speaks TLS, 1.2 or later. `context` confirms HTTP/2 to those who ask."""

    context: ssl.SSLContext
    http: ssl.SSLContext  # confirms HTTP/1.1 and no HTTP/2

    def __repr__(self) -> str:
        return "Tls(…)"


def load_tls(certificate: str, key: str) -> Tls:
    """The certificate (with its chain) and key in these files; raises SetupError."""
    # Read for the sentence that names the option, where one of them cannot be.
    read_secret(certificate, "--tls-cert", forbidden_mode=0)
    read_secret(key, "--tls-key", forbidden_mode=ANYBODY)
    try:
        # gRPC's clients want it confirmed that they may speak HTTP/2; those of remoting do not ask.
        contexts = [_context(certificate, key, protocol) for protocol in ("h2", "http/1.1")]
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise SetupError(
            f"--tls-cert {certificate}, --tls-key {key}: no certificate and its key in PEM, or a key with a password "
            f"({reason})"
        ) from error
    return Tls(*contexts)


def load_client_tls(roots: str, certificate: str, key: str) -> ssl.SSLContext:
    """Return how etcd is connected to: trusting these roots ("": the system's), showing a certificate if one is given.

    Raises SetupError.
    """
    where = f"etcd: CA {roots or '(of the system)'}, certificate {certificate}, key {key}"
    if bool(certificate) != bool(key):
        raise SetupError(f"{where}: name both a certificate and its key, or none")
    try:
        context = ssl.create_default_context(cafile=roots or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate:
            read_secret(key, "etcd: key", forbidden_mode=ANYBODY)
            context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise SetupError(f"{where}: no certificates in PEM, or a key with a password ({reason})") from error
    return context


def load_peer_tls(roots: str, certificate: str, key: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS between nodes, for the one that is connected to and for the one that connects. Raises SetupError.

    Both show this certificate, and both ask for one of these roots.
    """
    if not (certificate and key):
        raise SetupError(
            "--replication-ca is of no use without --tls-cert and --tls-key: name all three, or none"
        )
    client = load_client_tls(roots, certificate, key)
    server = _context(certificate, key, "timeball-replication")
    server.load_verify_locations(cafile=roots)
    server.verify_mode = ssl.CERT_REQUIRED
    return server, client


def _context(certificate: str, key: str, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    # A function for the password: without one, a key that has one would be asked for at the terminal.
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("a key with a password")


logger = logging.getLogger(__name__)

OTHERS = 0o077


class Security:
    """Accounts and certificate. `access` is None when every client is let in, `tls` when nothing is encrypted."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Read what the settings name; raises SetupError."""
        self._path = settings.access_file if settings else ""
        self.access = Access(self._read()) if self._path else None
        self.tls = load_tls(settings.tls_cert, settings.tls_key) if settings and settings.tls_cert else None

    def account(self, name: str) -> Caller:
        """Return the account of this access key as a caller, for work in its name; raises Unauthorized."""
        return ANONYMOUS if self.access is None else self.access.named(name)

    def reload(self) -> None:
        """Read the access file again."""
        if self.access is None:
            return
        try:
            accounts = self._read()
        except SetupError as error:
            logger.error("access file not reloaded reason=%s", error)
            return
        self.access.replace(accounts)
        logger.info("access file reloaded file=%s accounts=%d", self._path, len(accounts))

    def caller(self, headers: Mapping[str, str], now_ms: int) -> Caller:
        """Return the caller of these headers (names in lower case); raises Unauthorized under an access file."""
        return ANONYMOUS if self.access is None else self.access.authenticate(headers, now_ms)

    def status(self) -> dict[str, int]:
        """Figures for people: how many accounts there are, and how many requests came with none, or a wrong one."""
        known = self.access
        return (
            {"accounts": 0, "refused": 0}
            if known is None
            else {"accounts": len(known), "refused": known.refused}
        )

    def _read(self) -> Accounts:
        return access.parse(read_secret(self._path, "--access-file", forbidden_mode=OTHERS), self._path)


OPEN = Security()
