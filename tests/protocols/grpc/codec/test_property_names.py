"""Names that no user may take."""

from __future__ import annotations

import pytest

from timeball.broker.consuming.retry import SPENT
from timeball.protocols.grpc.codec.property_names import RESERVED


@pytest.mark.parametrize(
    "name", ["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "TIMER_DELIVER_MS", "TRAN_MSG", "PGROUP", "WAIT", "POP_CK"]
)
def test_what_rocketmq_keeps_for_itself_is_reserved(name: str) -> None:
    assert name in RESERVED


def test_whatever_has_delayed_a_message_is_reserved() -> None:
    assert SPENT <= RESERVED


@pytest.mark.parametrize("name", ["", "tags", "order", "REASON", "customer-id"])
def test_other_names_are_the_users(name: str) -> None:
    assert name not in RESERVED
