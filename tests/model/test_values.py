"""Single values of a message, without Arrow."""

import subprocess
import sys

import pytest

from timeball.model.errors import InvalidMessage
from timeball.model.message import READ_SCHEMA
from timeball.model.values import (
    decode_properties,
    encode_properties,
    keys_text,
    properties_text,
    shown,
    valid,
)
from timeball.model.wire import COLUMNS_MAX


def test_they_need_no_arrow() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = sys.modules['numpy'] = None; "
        "import timeball.model.values, timeball.model.wire, timeball.model.time_parsing"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_request_may_name_all_columns() -> None:
    assert len(READ_SCHEMA) == COLUMNS_MAX


def test_properties_have_one_text() -> None:
    assert decode_properties(encode_properties({"a": "b", "c": ""})) == {"a": "b", "c": ""}
    assert decode_properties("no separator\x02a\x01b\x02") == {"a": "b"}
    assert properties_text({}) is None
    with pytest.raises(InvalidMessage, match="separate properties"):
        properties_text({"a": "\x02"})


def test_keys_are_joined_and_errors_name_the_closest_value() -> None:
    assert keys_text(["a", "b"]) == "a b" and keys_text([]) is None
    assert valid("earlyest", ("earliest", "latest")).startswith("did you mean 'earliest'?")
    assert valid("a", ()) == "there are none"
    assert len(shown("x" * 500)) == 101
