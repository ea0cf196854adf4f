"""What the broker does for itself: keys of data files before somebody asks for them."""

from __future__ import annotations

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import HOUR_MS, World

from timeball.errors import Corrupt
from timeball.table.data_file import sidecar_name
from timeball.table.layout import FOLDER


def _sidecars(world: World) -> list[bool]:
    """For each data file, whether its key sidecar is there."""
    files = world.broker.parts.schedule.pending.all()
    return [world.files.exists(sidecar_name(file.entry.path)) for file in files]


@on_node()
async def test_new_data_files_get_their_keys_before_the_first_cancel(world: World) -> None:
    assert world.node is not None
    ids = await world.send("orders", [2 * HOUR_MS, 900 * HOUR_MS])
    await world.compact()
    assert _sidecars(world) == [False, False]
    await world.node.upkeep.index_keys()
    assert _sidecars(world) == [True, True]
    await world.cancel(ids[:1])


@on_node()
async def test_one_damaged_data_file_does_not_keep_the_others_from_it(world: World) -> None:
    assert world.node is not None
    ids = await world.send("orders", [2 * HOUR_MS, 900 * HOUR_MS])
    await world.compact()
    first = world.broker.parts.schedule.pending.all()[0]
    world.files.replace(f"{FOLDER}/{first.entry.path}", b"PAR1 is not all there is to it")
    await world.node.upkeep.index_keys()
    assert _sidecars(world) == [False, True]
    assert first.keys_tried  # said once, not every second
    with pytest.raises(Corrupt, match=first.entry.path):
        await world.broker.cancel(ids=ids)
