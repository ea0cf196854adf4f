"""A call: who makes it, as the headers say."""

from __future__ import annotations

import pytest

from timeball import limits
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code
from timeball.protocols.grpc.calls import CLIENT_ID, Call


def test_a_client_says_its_name() -> None:
    assert Call({CLIENT_ID: "host@1@2"}).client_id == "host@1@2"


@pytest.mark.parametrize(
    "headers", [{}, {CLIENT_ID: ""}, {CLIENT_ID: "x" * (limits.CLIENT_ID_CHARACTERS_MAX + 1)}]
)
def test_a_client_without_a_name_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        _ = Call(headers).client_id
    assert refused.value.protocol_code == Code.CLIENT_ID_REQUIRED
