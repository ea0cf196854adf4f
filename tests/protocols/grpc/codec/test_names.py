"""Resources by name: what passes, with which code the rest is refused, and back again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball import limits
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, Resource
from timeball.protocols.grpc.codec.names import group_name, resource, topic_name

NAMES = st.from_regex(r"[|a-zA-Z0-9_-]{1,40}", fullmatch=True)


@given(NAMES, st.one_of(st.just(""), NAMES))
def test_a_name_comes_back_as_its_client_knows_it(name: str, space: str) -> None:
    for read in (topic_name, group_name):
        assert resource(read(resource(f"{space}%{name}" if space else name, space)), space) == Resource(
            resource_namespace=space, name=name
        )


def test_a_namespace_stands_before_the_name() -> None:
    assert topic_name(Resource(resource_namespace="shop", name="orders")) == "shop%orders"
    assert topic_name(Resource(name="orders")) == "orders"


@pytest.mark.parametrize(
    "name", ["", "a.b", "../etc", "a b", "é", "a\n", "a" * (limits.TOPIC_BYTES_MAX + 1), "a/b"]
)
def test_a_bad_name_is_refused_with_the_code_of_its_kind(name: str) -> None:
    for read, code in (
        (topic_name, Code.ILLEGAL_TOPIC),
        (group_name, Code.ILLEGAL_CONSUMER_GROUP),
    ):
        with pytest.raises(Refused) as refused:
            read(Resource(name=name))
        assert refused.value.protocol_code == code


def test_a_namespace_counts_towards_the_length() -> None:
    name = "a" * limits.GROUP_BYTES_MAX
    assert group_name(Resource(name=name)) == name
    with pytest.raises(Refused, match="1 to 120"):
        group_name(Resource(resource_namespace="s", name=name))
