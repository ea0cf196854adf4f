"""Answers on their way: each address has its share, and nothing is left over of what has arrived."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.buffers import UNREAD_BYTES_MAX, Unread

HALF = UNREAD_BYTES_MAX // 2


def test_each_address_has_its_share() -> None:
    unread = Unread()
    with unread.held("a", HALF - 1):
        unread.check("a", 1)
        with pytest.raises(Refused, match="not read yet") as refused:
            unread.check("a", 2)
        assert refused.value.protocol_code == Code.TOO_MANY_REQUESTS
        unread.check("b", HALF)
        with pytest.raises(Refused), unread.held("a", 2):
            raise AssertionError("there is no room")
    unread.check("a", HALF)


def test_all_have_a_bound_whoever_asks() -> None:
    """However many addresses do not read: each alone might have been within its own bound."""
    unread, part = Unread(), 32 * 1024 * 1024
    with ExitStack() as held:
        for n in range(100):
            with suppress(Refused):
                held.enter_context(unread.held(f"deaf-{n}", part))
        assert UNREAD_BYTES_MAX - part < unread.all_bytes <= UNREAD_BYTES_MAX


def test_a_single_answer_may_have_any_size() -> None:
    with Unread().held("a", 2 * UNREAD_BYTES_MAX):
        pass


def test_nothing_is_left_over() -> None:
    unread = Unread()
    for ends_badly in (False, True):
        with ExitStack() as stack:
            if ends_badly:
                stack.enter_context(pytest.raises(ZeroDivisionError))
            with unread.held("a", 10):
                assert unread.all_bytes == 10
                if ends_badly:
                    raise ZeroDivisionError
        assert unread.all_bytes == 0 and not unread._shares.held_by("a")
