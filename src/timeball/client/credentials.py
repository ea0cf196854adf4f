"""Credentials of a client: its keys, and the certificates that it trusts.

Credentials come from the caller or from the environment. So a secret need not be part of a command line, which other
users can see, or of a Spark job's options. The client sends them with each call. No repr and no error contains them.

    TIMEBALL_ACCESS_KEY, TIMEBALL_SECRET_KEY    for a broker with an access file; set both or none
    TIMEBALL_TLS_ROOTS                          a PEM file of the certificates to trust, for a broker with TLS
    TIMEBALL_TLS_NAME                           the name in the broker's certificate, when it is dialed by another name
"""

from __future__ import annotations

import os
from typing import NamedTuple

from timeball.model.errors import RequestError

ACCESS_KEY, SECRET_KEY = "TIMEBALL_ACCESS_KEY", "TIMEBALL_SECRET_KEY"
TLS_ROOTS, TLS_NAME = "TIMEBALL_TLS_ROOTS", "TIMEBALL_TLS_NAME"


class Credentials(NamedTuple):
    """The client's keys and the certificates it trusts. Empty values are not sent."""

    access_key: str = ""
    secret_key: str = ""
    tls_roots: bytes | None = None
    tls_name: str = ""

    @property
    def authorization(self) -> str:
        """The value of the header Authorization. "" without keys."""
        return f"Bearer {self.access_key}:{self.secret_key}" if self.access_key else ""

    def __repr__(self) -> str:
        return f"Credentials(access_key={self.access_key!r}, …)"


def credentials(
    access_key: str | None = None, secret_key: str | None = None, tls_roots: bytes | None = None
) -> Credentials:
    """Build credentials from the arguments, and from the environment where an argument is None.

    `tls_roots`: PEM certificates. Raises RequestError if only one key is set, if a key cannot be sent in a header, or
    if the file of certificates cannot be read.
    """
    if (access_key is None) != (secret_key is None):
        raise RequestError("access_key and secret_key go together: give both, or none")
    key = os.environ.get(ACCESS_KEY, "") if access_key is None else access_key
    secret = os.environ.get(SECRET_KEY, "") if secret_key is None else secret_key
    if bool(key) != bool(secret):
        present, missing = (ACCESS_KEY, SECRET_KEY) if key else (SECRET_KEY, ACCESS_KEY)
        raise RequestError(f"{present} is set and {missing} is not: set both, or none")
    if not (f"{key}{secret}".isascii() and f"{key}{secret}".isprintable()):
        raise RequestError("access key or secret: only printable ASCII can be sent")
    path = os.environ.get(TLS_ROOTS, "")
    if tls_roots is None and path:
        tls_roots = read_roots(path, TLS_ROOTS)
    return Credentials(key, secret, tls_roots, os.environ.get(TLS_NAME, ""))


def read_roots(path: str, name: str) -> bytes:
    """Read the certificates at `path`, the value of the setting `name`. Raises RequestError if that fails."""
    from pathlib import Path  # slow to import, and few clients name a file

    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{name}={path}: {error.strerror or error}") from error
