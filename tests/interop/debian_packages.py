"""Packages of Debian, fetched with apt by version and hash, and their files. Nothing is installed."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from tests.interop.environments import LOCKS, fetch, kept, tool

LOCK = LOCKS / "debs.txt"


def package(name: str) -> Path:
    """Return the folder with the files of a package. Raise Missing without apt, or if the version is gone.

    Raises ValueError for a package with another hash than that of the lock.
    """
    version, digest = _locked()[name]
    apt, dpkg = tool("apt-get", "apt"), tool("dpkg-deb", "dpkg")

    def make(folder: Path) -> None:
        # apt writes into its current folder.
        fetch(
            [tool("env", "coreutils"), f"--chdir={folder}", apt, "download", "--quiet", f"{name}={version}"]
        )
        (file,) = folder.glob("*.deb")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{file.name} is not what locks/debs.txt says")
        subprocess.run([dpkg, "--extract", str(file), str(folder / "files")], check=True)

    return kept(f"deb-{name}", [LOCK], make) / "files"


def names() -> list[str]:
    """Return the names of all packages of the lock."""
    return list(_locked())


def _locked() -> dict[str, tuple[str, str]]:
    """Read the lock: the version and the SHA-256 in hex of each package, by its name."""
    lines = (line.split() for line in LOCK.read_text("utf-8").splitlines())
    locked = {}
    for named, digest in lines:
        name, _, version = named.partition("=")
        locked[name] = (version, digest)
    return locked
