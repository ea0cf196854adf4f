"""`hour_log` keeps the contract of a schedule, and what it promises besides."""

from __future__ import annotations

from functools import partial

from tests.schedule.contract import Contract
from tests.schedule.rigs import HourLogRig


class TestContract(Contract):
    """Everything in tests/schedule/contract.py."""

    new_rig = HourLogRig


class TestContractWithRoomForAll(Contract):
    """No gather is ever cut."""

    new_rig = partial(HourLogRig, gather_bytes=1 << 30)


class TestContractWithRoomForOne(Contract):
    """A body is larger than the memory for bodies: it is loaded all the same, one at a time."""

    new_rig = partial(HourLogRig, gather_bytes=1)
    examples = 8  # each row is a gather of its own
