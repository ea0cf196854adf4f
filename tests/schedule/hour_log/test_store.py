"""`hour_log` keeps the contract of a schedule, and what it promises besides."""

from __future__ import annotations

from tests.schedule.contract import Contract
from tests.schedule.rigs import HourLogRig


class TestContract(Contract):
    """Everything in tests/schedule/contract.py."""

    new_rig = HourLogRig
