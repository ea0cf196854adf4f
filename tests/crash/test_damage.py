"""1,000 damages over every kind of file: 0 silent differences. It is told, by name, or nothing has changed."""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import msgspec
import pytest
from tests.crash.damage import KINDS, WAYS, Damage, Result, drawn, kind_of, names, result
from tests.crash.folder import VARIANTS, Kept, Look, lived, look

from timeball import documents
from timeball.log import checkpoint

SEED = int(os.environ.get("CUT_SEED", "1"))
BAD = ("silent", "fault")


@cache
def folder(variant: str) -> tuple[Kept, Look]:
    kept = lived(variant)
    return kept, look(kept, kept.copy())


def wrong(results: list[Result]) -> list[str]:
    return [f"{one.damage}: {one.outcome}, {one.text[:400]}" for one in results if one.outcome in BAD]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_that_nobody_has_touched_looks_the_same_and_is_right(variant: str) -> None:
    kept, expected = folder(variant)
    assert expected["faults"] == []
    assert look(kept, kept.copy()) == expected


def test_there_is_a_file_of_every_kind() -> None:
    found = {kind_of(name) for variant in VARIANTS for name in names(folder(variant)[0].files)}
    assert found >= KINDS.keys()
    ways = {(kind_of(one.name), one.way) for v in VARIANTS for one in drawn(folder(v)[0], 250, SEED)}
    assert len(ways) > 0.8 * len(KINDS) * len(WAYS)


def test_some_damage_is_never_silent() -> None:
    kept, expected = folder("retained")
    assert wrong([result(kept, expected, damage) for damage in drawn(kept, 12, SEED)]) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["hour_log", "retained"])
def test_500_damages_are_never_silent(variant: str) -> None:
    kept, expected = folder(variant)
    results = [result(kept, expected, damage) for damage in drawn(kept, 500, SEED)]
    assert wrong(results) == []
    assert min(Counter(one.outcome for one in results).values()) > 25, (
        "damage that nobody meets proves nothing"
    )


# ---- controls: what nobody could notice must be noticed by the harness --------------------------------------


class Silently(Damage):
    """A change with the right checksum over it."""

    def do(self, files) -> None:  # type: ignore[no-untyped-def]
        if self.name == "checkpoint":
            known = checkpoint.load(files)
            assert known is not None and known.facts.files
            facts = msgspec.structs.replace(known.facts, files=known.facts.files[1:])
            checkpoint.save(files, msgspec.structs.replace(known, facts=facts))
        else:
            kept = documents.load(files, self.name, dict)
            assert kept is not None
            kept["offsets"]["readers"]["a"] = dict.fromkeys(kept["offsets"]["readers"]["a"], 0)
            files.replace(self.name, documents.encode(kept))


@pytest.mark.parametrize("name", ["checkpoint", "offsets.json"])
def test_a_change_under_the_right_checksum_is_noticed(name: str) -> None:
    kept, expected = folder("hour_log")
    assert result(kept, expected, Silently(name, "sealed", 0, 0)).outcome == "silent"
