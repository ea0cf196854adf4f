"""The coordinator of a process, by its settings."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from timeball.cluster.coordination.etcd import create_coordinator
from timeball.io.clock import SystemClock
from timeball.model.config import Settings
from timeball.model.errors import SetupError

PLAIN = {"cluster": "c", "node": "a", "etcd": "http://127.0.0.1:2379"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"etcd": "127.0.0.1:2379"}, "etcd"),
        ({"etcd": "https://127.0.0.1:2379", "etcd_cert": "there.pem"}, "certificate"),
        ({"etcd_user": "timeball", "etcd_password_file": "nowhere"}, "--etcd-password-file"),
    ],
)
def test_wrong_options_of_the_coordinator_are_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        create_coordinator(Settings(**PLAIN | options), SystemClock())  # type: ignore[arg-type]


def test_the_password_is_read_from_its_file(tmp_path: Path) -> None:
    async def run() -> None:
        secret = tmp_path / "password"
        secret.touch(0o600)
        secret.write_text("swordfish\n")
        options = {"etcd_user": "timeball", "etcd_password_file": str(secret)}
        await create_coordinator(Settings(**PLAIN | options), SystemClock()).close()  # type: ignore[arg-type]

    asyncio.run(run())
