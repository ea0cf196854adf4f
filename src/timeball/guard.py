"""Who may come in, and how they are spoken to, as the settings say it: an access file and a certificate, loaded.

Both are read when the broker starts, which fails if either is not sound. The access file is read again when the
operator says so (SIGHUP); one that is not sound then is named in the broker's log, and changes nothing. A new
certificate needs a new start, since one of the edges cannot exchange its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from timeball import access, tls
from timeball.access import ANONYMOUS, Access, Accounts, Caller
from timeball.config import Settings
from timeball.errors import SetupError
from timeball.files import read_secret

logger = logging.getLogger(__name__)

OTHERS = 0o077


class Guard:
    """See the module. `access` and `tls` are None where everybody may come in, and where nothing is encrypted."""

    def __init__(self, settings: Settings | None = None) -> None:
        """Read what the settings name; raises SetupError."""
        self._path = settings.access_file if settings else ""
        self.access = Access(self._read()) if self._path else None
        self.tls = tls.load(settings.tls_cert, settings.tls_key) if settings and settings.tls_cert else None

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
        """Return who sends these headers (names in lower case): anybody without an access file. Raises Unauthorized."""
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


OPEN = Guard()
