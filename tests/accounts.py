"""An access file for tests with three accounts, one of them an administrator, and nodes that use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.node_fixture import RunningNode, running_node

ACCESS_FILE = """
[[accounts]]
access_key = "shop"
secret_key = "shop secret 1"
topics = { "orders" = "PUB|SUB" }
groups = { "workers" = "SUB" }

[[accounts]]
access_key = "other"
secret_key = "other secret 2"
topics = { "news" = "PUB|SUB" }
groups = { "readers" = "SUB" }

[[accounts]]
access_key = "root"
secret_key = "root secret 3"
admin = true
"""
SECRETS = {"shop": "shop secret 1", "other": "other secret 2", "root": "root secret 3"}


def access_file(folder: Path, text: str = ACCESS_FILE) -> Path:
    """Write the file with the permissions that the broker requires."""
    path = folder / "access.toml"
    path.touch(0o600)
    path.write_text(text)
    return path


@contextmanager
def guarded_node(folder: Path, **settings: Any) -> Iterator[RunningNode]:
    """Run a node with these accounts."""
    with running_node(folder / "data", access_file=str(access_file(folder)), **settings) as running:
        yield running


def keys(account: str) -> dict[str, str]:
    """Return the credentials of an account as arguments of a client."""
    return {"access_key": account, "secret_key": SECRETS[account]}
