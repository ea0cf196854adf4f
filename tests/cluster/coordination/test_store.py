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

    class Comparing(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            self.memory_world, self.etcd_world = World(None), World(endpoints)
            self.model = model_kind(self.memory_world.memory)
            self.etcd = self.etcd_world.store()
            self.base = f"{self.etcd_world.cluster}/"
            self.leases: list[tuple[int, int]] = []  # (of the model, of etcd)
            self.revisions = [(0, 0)]  # (of the model, of etcd), in the same order

        def lease(self, number: int) -> tuple[int, int]:
            """Choose a lease of the model and of etcd: none for 0, a granted one, or one that never existed."""
            if number == 0:
                return 0, 0
            return self.leases[number - 1] if number <= len(self.leases) else (999, 999)

        @rule()
        def grant(self) -> None:
            """Grant a lease on both sides."""
            model_id, model_s = self.runner.run(self.model.grant(LONG_TTL_MS // 1_000))
            etcd_id, etcd_s = self.runner.run(self.etcd.grant(LONG_TTL_MS // 1_000))
            assert model_s == etcd_s
            self.leases.append((model_id, etcd_id))

        @precondition(lambda self: self.leases)
        @rule(number=st.integers(1, 4), is_renewal=st.booleans())
        def end_or_renew(self, number: int, is_renewal: bool) -> None:
            """Revoke or renew a lease on both sides."""
            pair = self.lease(number)
            verbs = [(store.renew if is_renewal else store.revoke) for store in (self.model, self.etcd)]
            of_model, of_etcd = (self.outcome(verb(lease)) for verb, lease in zip(verbs, pair))
            assert of_model == of_etcd

        @rule(
            compared=st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.integers(0, 5)), max_size=2),
            then=st.lists(
                st.tuples(st.sampled_from(KEYS), st.integers(-1, 4)),
                max_size=3,
                unique_by=lambda operation: operation[0],
            ),
            otherwise=st.lists(
                st.tuples(st.sampled_from(KEYS), st.integers(-1, 1)),
                max_size=2,
                unique_by=lambda operation: operation[0],
            ),
        )
        def transact(self, compared: Any, then: Any, otherwise: Any) -> None:
            """Carry out a transaction on both sides, which also reads."""
            sides = []
            for side, store in enumerate((self.model, self.etcd)):
                when = [self.comparison(*arguments, side) for arguments in compared]
                lists = [[*(self.operation(*arguments, side) for arguments in chosen), *self.reads()]
                         for chosen in (then, otherwise)]  # fmt: skip
                sides.append(self.outcome(store.transact(when, *lists)))
            self.assert_equal(*sides)

        @invariant()
        def read(self) -> None:
            """Compare all keys of both sides."""
            sides = [self.outcome(store.transact([], self.reads())) for store in (self.model, self.etcd)]
            self.assert_equal(*sides)

        def comparison(self, key: str, is_lease: bool, number: int, side: int) -> Comparison:
            """Build a comparison of one side (0: the model, 1: etcd) from drawn values."""
            if is_lease:
                return LeaseIs(self.base + key, self.lease(number)[side])
            # The revision of one of the newest keys, or 0: the key does not exist.
            return RevisionIs(self.base + key, self.revisions[-min(number, len(self.revisions))][side])

        def operation(self, key: str, number: int, side: int) -> Operation:
            """Build a put or a delete of one side from drawn values."""
            if number < 0:
                return Delete(self.base + key)
            return Put(self.base + key, f"{number}".encode(), self.lease(number)[side])

        def reads(self) -> list[Read]:
            """Return reads of all keys, of one, and below a prefix."""
            return [
                Read(self.base, is_prefix=True),
                Read(self.base + "b"),
                Read(self.base + "b/", is_prefix=True),
            ]

        def outcome(self, call: Any) -> Any:
            """Return the result of a call, or "lost" if it refuses a lease that does not exist."""
            try:
                return self.runner.run(call)
            except LeaseLost:
                return "lost"

        def assert_equal(self, of_model: Outcome | str, of_etcd: Outcome | str) -> None:
            """Compare the answers of both sides."""
            if isinstance(of_model, str) or isinstance(of_etcd, str):
                assert of_model == of_etcd
                return
            assert of_model.succeeded == of_etcd.succeeded
            assert [len(entries) for entries in of_model.reads] == [len(entries) for entries in of_etcd.reads]
            for one, other in zip(chain(*of_model.reads), chain(*of_etcd.reads)):
                assert (one.key, one.value) == (other.key, other.value)
                assert one.lease_id == other.lease_id == 0 or (one.lease_id, other.lease_id) in self.leases
                self.compare_revisions(one.revision, other.revision)

        def compare_revisions(self, of_model: int, of_etcd: int) -> None:
            """Compare equality and order of revisions. Their numbers differ, because other tests use this etcd, too."""
            for pair in self.revisions:
                assert (pair[0] < of_model, pair[0] == of_model) == (pair[1] < of_etcd, pair[1] == of_etcd)
            if (of_model, of_etcd) not in self.revisions:
                self.revisions = sorted([*self.revisions, (of_model, of_etcd)])

        def teardown(self) -> None:
            for _, lease in self.leases:
                self.runner.run(self.etcd.revoke(lease))
            self.runner.run(self.etcd.close())
            self.runner.close()

    return Comparing


def hypothesis_settings(examples: int, **more: Any) -> settings:
    """Return settings for so many examples of at most 12 steps."""
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
    # One difference suffices: neither the shortest one, nor one of each kind is searched.
    hunt = hypothesis_settings(300, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(comparing_machine(etcd.endpoints, wrong), settings=hunt)
