"""The secret is made once and is the same after every start."""

from __future__ import annotations

import pytest
from tests.broker.on_node import on_node
from tests.broker.receiving.subscriber import receiving
from tests.crash.world import World
from tests.crash_files import CrashFiles

from timeball.broker.registry import receipt_secret as seal
from timeball.errors import Corrupt


def test_it_is_made_once_and_survives_the_power() -> None:
    files = CrashFiles()
    made = seal.load(files)
    assert len(made) == seal.SIZE_BYTES
    assert seal.load(files) == made == seal.load(files.crash(survival="nothing"))
    assert seal.load(CrashFiles()) != made, "another folder has another"


def test_one_that_is_damaged_is_refused_by_name() -> None:
    """A new one would void the receipts that consumers hold."""
    files = CrashFiles()
    seal.load(files)
    files.replace(seal.NAME, files.content(seal.NAME)[:-1])
    with pytest.raises(Corrupt, match=r"receipts\.key"):
        seal.load(files)


@on_node()
async def test_receipts_are_as_good_after_a_restart(world: World) -> None:
    before = receiving(world).seal
    await world.restart()
    assert receiving(world).seal == before
