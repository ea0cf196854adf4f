"""Load the access file and the TLS certificate of the settings.

All edges use the same certificate and key, in two contexts: one for HTTP/2 and one for HTTP/1.1.

Access file, certificate and key are read and checked when the broker starts. A key that belongs to another certificate,
or that other users may read, ends the start with an error that names the option. So it cannot cause failing handshakes
later. SIGHUP reloads the access file. If the new file has an error, the broker logs it and keeps the old accounts. A
new certificate requires a restart.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from typing import NamedTuple

from timeball.io.files import read_secret
from timeball.model import access
from timeball.model.access import ANONYMOUS, Access, Accounts, Caller
from timeball.model.config import Settings
from timeball.model.errors import SetupError

logger = logging.getLogger(__name__)

ANYBODY = 0o007  # forbidden mode of a key: its group may read it, as with Debian's group ssl-cert


class Tls(NamedTuple):
    """The TLS contexts of the edges, with the broker's certificate and key. TLS 1.2 or later."""

    # For all edges except the HTTP edge. It confirms HTTP/2 to clients that ask for it (ALPN).
    context: ssl.SSLContext
    http: ssl.SSLContext  # for the HTTP edge: confirms HTTP/1.1, but not HTTP/2

    def __repr__(self) -> str:
        return "Tls(…)"


def load_tls(certificate: str, key: str) -> Tls:
    """Load the server certificate (with its chain) and its key from these files. Raises SetupError."""
    # Read both files first, for an error that names the option if one of them cannot be read.
    read_secret(certificate, "--tls-cert", forbidden_mode=0)
    read_secret(key, "--tls-key", forbidden_mode=ANYBODY)
    try:
        # gRPC clients require that the server confirms HTTP/2. Remoting clients do not use ALPN.
        contexts = [_context(certificate, key, protocol) for protocol in ("h2", "http/1.1")]
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise SetupError(
            f"--tls-cert {certificate}, --tls-key {key}: no certificate and its key in PEM, or a key with a password "
            f"({reason})"
        ) from error
    return Tls(*contexts)


def load_client_tls(roots: str, certificate: str, key: str, *, purpose: str = "etcd") -> ssl.SSLContext:
    """Build the context of a TLS client, for etcd and for other nodes. Raises SetupError.

    The client trusts the CA certificates in the file `roots` ("": the system's). It presents `certificate` unless "".
    `purpose` begins the errors: the settings with this prefix name the files.
    """
    description = f"{purpose}: CA {roots or '(of the system)'}, certificate {certificate}, key {key}"
    if bool(certificate) != bool(key):
        raise SetupError(f"{description}: name both a certificate and its key, or none")
    try:
        context = ssl.create_default_context(cafile=roots or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate:
            read_secret(key, f"{purpose}: key", forbidden_mode=ANYBODY)
            context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise SetupError(
            f"{description}: no certificates in PEM, or a key with a password ({reason})"
        ) from error
    return context


def load_peer_tls(roots: str, certificate: str, key: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Build the two contexts of TLS between nodes: (server, client). Raises SetupError.

    Both present `certificate`, and both require that the other side's certificate is signed by a CA in `roots`.
    """
    if not (certificate and key):
        raise SetupError(
            "--replication-ca is of no use without --tls-cert and --tls-key: name all three, or none"
        )
    client = load_client_tls(roots, certificate, key, purpose="replication")
    server = _context(certificate, key, "timeball-replication")
    server.load_verify_locations(cafile=roots)
    server.verify_mode = ssl.CERT_REQUIRED
    return server, client


def _context(certificate: str, key: str, protocol: str) -> ssl.SSLContext:
    """Build a server context that offers one ALPN protocol. Raises ssl.SSLError, ValueError and OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    # Without a function for the password, OpenSSL would ask for the password of a key at the terminal.
    context.load_cert_chain(certificate, key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("a key with a password")


OTHERS = 0o077  # forbidden mode of the access file: only its owner may read it


class Security:
    """Accounts and certificate of a broker. `access` is None without access control, `tls` is None without TLS."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Read the files of the settings. Raises SetupError."""
        self._path = settings.access_file if settings else ""
        self.access = Access(self._read()) if self._path else None
        self.tls = load_tls(settings.tls_cert, settings.tls_key) if settings and settings.tls_cert else None

    def account(self, name: str) -> Caller:
        """Look up the account with the access key `name`, for work on its behalf. Raises Unauthorized."""
        return ANONYMOUS if self.access is None else self.access.named(name)

    def reload(self) -> None:
        """Read the access file again. If it has an error, log the error and keep the accounts."""
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
        """Authenticate a request by its headers (names in lower case) and return its caller.

        Without an access file every caller is ANONYMOUS. With one, it raises Unauthorized for bad credentials.
        """
        return ANONYMOUS if self.access is None else self.access.authenticate(headers, now_ms)

    def status(self) -> dict[str, int]:
        """Count the accounts, and the requests refused for missing or invalid credentials."""
        access_control = self.access
        return (
            {"accounts": 0, "refused": 0}
            if access_control is None
            else {"accounts": len(access_control), "refused": access_control.refused}
        )

    def _read(self) -> Accounts:
        return access.parse(read_secret(self._path, "--access-file", forbidden_mode=OTHERS), self._path)


OPEN = Security()
