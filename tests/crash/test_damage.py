"""Damage of every kind of file is reported by name, or changes nothing. There is no silent difference.

Another CUT_SEED selects other damage.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache

import msgspec
import pytest
from tests.crash.damage import (
    KINDS,
    WAYS,
    Damage,
    Result,
    change_value,
    drawn,
    kind_of,
    names,
    result,
    written,
)
from tests.crash.folder import VARIANTS, Kept, Look, lived, look
from tests.rounds import rounds

from timeball.log import checkpoint
from timeball.schedule import mapped_log

SEED = int(os.environ.get("CUT_SEED", "1"))
DAMAGES = rounds(30, 150)
BAD = ("silent", "fault")  # outcomes, see damage.py


@cache
def folder(variant: str) -> tuple[Kept, Look]:
    """Return the folder of a variant, and the look at it."""
    kept = lived(variant)
    return kept, look(kept, kept.copy())


def wrong(results: list[Result]) -> list[str]:
    """Describe the damages that changed the state silently, or were reported without the file or the remedy."""
    return [
        f"{result.damage}: {result.outcome}, {result.text[:400]}"
        for result in results
        if result.outcome in BAD
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_undamaged_copy_of_the_folder_has_the_same_state_without_faults(variant: str) -> None:
    kept, expected = folder(variant)
    assert expected["faults"] == []
    assert look(kept, kept.copy()) == expected


def test_the_folders_have_files_of_every_kind_and_the_drawn_damages_most_ways() -> None:
    kinds = {kind_of(name) for variant in VARIANTS for name in names(folder(variant)[0].files)}
    assert kinds >= KINDS.keys()
    ways = {
        (kind_of(damage.name), damage.way)
        for variant in VARIANTS
        for damage in drawn(folder(variant)[0], 250, SEED)
    }
    assert len(ways) > 0.8 * len(KINDS) * len(WAYS)


def test_some_damages_are_reported_or_change_nothing() -> None:
    kept, expected = folder("retained")
    assert wrong([result(kept, expected, damage) for damage in drawn(kept, 12, SEED)]) == []


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["hour_log", "retained"])
def test_many_damages_are_reported_or_change_nothing(variant: str) -> None:
    kept, expected = folder(variant)
    results = [result(kept, expected, damage) for damage in drawn(kept, DAMAGES, SEED)]
    assert wrong(results) == []
    assert min(Counter(result.outcome for result in results).values()) > DAMAGES // 20, (
        "damage that no step meets proves nothing"
    )


def of_own_files(kept: Kept, kind: str, count: int) -> list[Damage]:
    """Draw damages to the files that only one strategy has."""
    return [one for one in drawn(kept, 16 * count, SEED) if kind_of(one.name) == kind][:count]


KEPT = [("timer_wheel", "wheel"), ("level_cascade", "cascade")]


@pytest.mark.parametrize(("variant", "kind"), KEPT)
def test_a_flipped_bit_in_the_caches_of_a_strategy_changes_nothing(variant: str, kind: str) -> None:
    """The start reads the log instead."""
    kept, expected = folder(variant)
    damages = [one for one in of_own_files(kept, kind, 40) if one.way in ("bit", "byte", "block")][:4]
    results = [result(kept, expected, damage) for damage in damages]
    assert [one.outcome for one in results] == ["same"] * 4, wrong(results)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(("variant", "kind"), KEPT)
def test_many_damages_of_a_folder_with_the_caches_of_a_strategy_are_reported_or_change_nothing(
    variant: str, kind: str
) -> None:
    """Half of the damages are in the files of the strategy, which a start rebuilds."""
    kept, expected = folder(variant)
    own = [result(kept, expected, damage) for damage in of_own_files(kept, kind, DAMAGES // 3)]
    assert wrong(own) == []
    assert {one.outcome for one in own} == {"same"}
    others = [result(kept, expected, damage) for damage in drawn(kept, DAMAGES // 3, SEED)]
    assert wrong(others) == []
    assert "refused" in {one.outcome for one in others}, "damage that no step meets proves nothing"


# ---- controls: the harness notices damage that the broker cannot notice ---------------------------------------


class Silently(Damage):
    """A change with a valid checksum."""

    def do(self, files) -> None:  # type: ignore[no-untyped-def]
        if self.name == "checkpoint":
            stored = checkpoint.load(files)
            assert stored is not None and stored.facts.files
            facts = msgspec.structs.replace(stored.facts, files=stored.facts.files[1:])
            checkpoint.save(files, checkpoint.encode(msgspec.structs.replace(stored, facts=facts)))
        else:
            files.remove("checkpoint")
            change_value(files, self.name)


@pytest.mark.parametrize("name", ["checkpoint", "offsets/readers@a"])
def test_a_change_under_the_right_checksum_is_noticed(name: str) -> None:
    kept, expected = folder("hour_log")
    assert result(kept, expected, Silently(name, "sealed", 0, 0)).outcome == "silent"


def test_a_flipped_bit_that_no_checksum_meets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: without the comparison a scheduled message is lost silently."""
    kept, expected = folder("timer_wheel")
    monkeypatch.setattr(mapped_log, "_verified", lambda stored, *_: stored["record"].copy())
    name = next(name for name in names(kept.files) if "/entries/" in name)
    outcomes = {
        result(kept, expected, Damage(name, "bit", position, 3)).outcome
        for position in range(8, written(kept.files, name), 64)
    }
    assert outcomes & {"silent", "fault"}
