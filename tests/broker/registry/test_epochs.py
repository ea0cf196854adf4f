"""The row that opens an epoch is state like any other: a broker that reads the log knows the last leader."""

from __future__ import annotations

from tests.broker.registry.state_rows import StateRows

from timeball.broker.registry.groups import EPOCH_KEY, PREFIX, EpochFacts
from timeball.broker.registry.meta import MetaLog, MetaTable


def epochs(meta: MetaLog) -> MetaTable[EpochFacts]:
    return MetaTable(meta, PREFIX, EpochFacts)


def test_the_last_epoch_is_restored_after_a_restart() -> None:
    log = StateRows()
    name = EPOCH_KEY.removeprefix(f"{PREFIX}/")
    for facts in (EpochFacts(7, "a/1f", 1_700_000_000_000), EpochFacts(9, "b/2e", 1_700_000_000_500)):
        log.opened(epochs).put([(name, facts)])
        assert log.opened(epochs).values == {name: facts}
