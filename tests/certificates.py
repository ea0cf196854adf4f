"""Certificates for tests: an authority, and certificates signed by it, as files that only this user may read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import trustme


class Certificate(NamedTuple):
    """Paths, as a user would give them."""

    cert: str
    key: str
    roots: str

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a broker with this certificate."""
        return {"tls_cert": self.cert, "tls_key": self.key}


def certificate(folder: Path, *names: str) -> Certificate:
    """Issue a certificate for these names, or for this machine if there are none."""
    authority = trustme.CA()
    issued = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    folder.mkdir(exist_ok=True)
    paths = Certificate(*(str(folder / name) for name in ("chain.pem", "key.pem", "roots.pem")))
    Path(paths.cert).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    Path(paths.key).touch(0o600)
    issued.private_key_pem.write_to_path(paths.key)
    authority.cert_pem.write_to_path(paths.roots)
    return paths
