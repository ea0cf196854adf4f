"""The model in memory and real etcd get the same random operations, and give the same answers.

So a test in memory, and a simulation with the same rules, also applies to etcd.
"""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.cluster.etcd_cluster import EtcdCluster
from tests.cluster.memory_store import MemoryStore
from tests.cluster.worlds import LONG_TTL_MS, World

from timeball.cluster.coordination.store import (
    Comparison,
    Delete,
    LeaseIs,
    Operation,
    Outcome,
    Put,
    Read,
    RevisionIs,
)
from timeball.model.errors import LeaseLost

KEYS = ("a", "b", "b/c")


def comparing_machine(
    endpoints: list[str], model_kind: type[MemoryStore] = MemoryStore
) -> type[RuleBasedStateMachine]:
    """Make a state machine that carries out each step in the model and on etcd, and compares the answers."""

    class Both(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            self.memory_world, self.etcd_world = World(None), World(endpoints)
            self.model = model_kind(self.memory_world.memory)
            self.etcd = self.etcd_world.store()
            self.base = f"{self.etcd_world.cluster}/"
            self.leases: list[tuple[int, int]] = []  # (of the model, of etcd)
            self.revisions = [(0, 0)]  # the revisions that were seen, in both

        def lease(self, number: int) -> tuple[int, int]:
            """Choose a lease of the model and of etcd: none for 0, a granted one, or one that never existed."""
            if number == 0:
                return 0, 0
            return self.leases[number - 1] if number <= len(self.leases) else (999, 999)

        @rule()
        def grant(self) -> None:
            ours, ours_s = self.runner.run(self.model.grant(LONG_TTL_MS // 1_000))
            theirs, theirs_s = self.runner.run(self.etcd.grant(LONG_TTL_MS // 1_000))
            assert ours_s == theirs_s
            self.leases.append((ours, theirs))

        @precondition(lambda self: self.leases)
        @rule(number=st.integers(1, 4), is_renewal=st.booleans())
        def end_or_renew(self, number: int, is_renewal: bool) -> None:
            pair = self.lease(number)
            verbs = [(store.renew if is_renewal else store.revoke) for store in (self.model, self.etcd)]
            ours, theirs = (self.outcome(verb(lease)) for verb, lease in zip(verbs, pair))
            assert ours == theirs

        @rule(
            compared=st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.integers(0, 5)), max_size=2),
            then=st.lists(
                st.tuples(st.sampled_from(KEYS), st.integers(-1, 4)), max_size=3, unique_by=lambda e: e[0]
            ),
            otherwise=st.lists(
                st.tuples(st.sampled_from(KEYS), st.integers(-1, 1)), max_size=2, unique_by=lambda e: e[0]
            ),
        )
        def transact(self, compared: Any, then: Any, otherwise: Any) -> None:
            sides = []
            for side, store in enumerate((self.model, self.etcd)):
                when = [self.comparison(*each, side) for each in compared]
                lists = [[*(self.operation(*each, side) for each in chosen), *self.reads()]
                         for chosen in (then, otherwise)]  # fmt: skip
                sides.append(self.outcome(store.transact(when, *lists)))
            self.assert_equal(*sides)

        @invariant()
        def read(self) -> None:
            sides = [self.outcome(store.transact([], self.reads())) for store in (self.model, self.etcd)]
            self.assert_equal(*sides)

        def comparison(self, key: str, is_lease: bool, number: int, side: int) -> Comparison:
            if is_lease:
                return LeaseIs(self.base + key, self.lease(number)[side])
            # Of the newest keys that were seen, or 0: there is no such key.
            return RevisionIs(self.base + key, self.revisions[-min(number, len(self.revisions))][side])

        def operation(self, key: str, number: int, side: int) -> Operation:
            if number < 0:
                return Delete(self.base + key)
            return Put(self.base + key, f"{number}".encode(), self.lease(number)[side])

        def reads(self) -> list[Read]:
            return [
                Read(self.base, is_prefix=True),
                Read(self.base + "b"),
                Read(self.base + "b/", is_prefix=True),
            ]

        def outcome(self, call: Any) -> Any:
            try:
                return self.runner.run(call)
            except LeaseLost:
                return "lost"

        def assert_equal(self, ours: Outcome | str, theirs: Outcome | str) -> None:
            if isinstance(ours, str) or isinstance(theirs, str):
                assert ours == theirs
                return
            assert ours.succeeded == theirs.succeeded
            assert [len(found) for found in ours.reads] == [len(found) for found in theirs.reads]
            for one, other in zip(chain(*ours.reads), chain(*theirs.reads)):
                assert (one.key, one.value) == (other.key, other.value)
                assert one.lease_id == other.lease_id == 0 or (one.lease_id, other.lease_id) in self.leases
                self.compare_revisions(one.revision, other.revision)

        def compare_revisions(self, ours: int, theirs: int) -> None:
            """Compare equality and order of revisions. Their numbers differ, because other tests use this etcd, too."""
            for pair in self.revisions:
                assert (pair[0] < ours, pair[0] == ours) == (pair[1] < theirs, pair[1] == theirs)
            if (ours, theirs) not in self.revisions:
                self.revisions = sorted([*self.revisions, (ours, theirs)])

        def teardown(self) -> None:
            for _, lease in self.leases:
                self.runner.run(self.etcd.revoke(lease))
            self.runner.run(self.etcd.close())
            self.runner.close()

    return Both


def hypothesis_settings(examples: int, **more: Any) -> settings:
    checks = list(HealthCheck)
    return settings(
        max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=checks, **more
    )


@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize("examples", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_the_model_in_memory_answers_as_etcd_does(etcd: EtcdCluster, examples: int) -> None:
    run_state_machine_as_test(comparing_machine(etcd.endpoints), settings=hypothesis_settings(examples))


class ForgetsLeases(MemoryStore):
    """Wrong: a key stays when its lease ends."""

    async def revoke(self, lease_id: int) -> None:
        self.memory.leases.pop(lease_id, None)


class SwapsAlways(MemoryStore):
    """Wrong: does not compare revisions."""

    def _holds(self, comparison: Comparison) -> bool:
        return not isinstance(comparison, LeaseIs) or super()._holds(comparison)


@pytest.mark.slow
@pytest.mark.xdist_group("etcd")
@pytest.mark.parametrize("wrong", [ForgetsLeases, SwapsAlways])
def test_a_model_that_is_wrong_is_noticed(etcd: EtcdCluster, wrong: type[MemoryStore]) -> None:
    # The first one found suffices: neither the shortest, nor one of each kind.
    hunt = hypothesis_settings(300, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(comparing_machine(etcd.endpoints, wrong), settings=hunt)
