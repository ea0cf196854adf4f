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


def test_values_wire_and_time_parsing_are_imported_without_arrow_and_numpy() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = sys.modules['numpy'] = None; "
        "import timeball.model.values, timeball.model.wire, timeball.model.time_parsing"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_limit_of_columns_is_the_number_of_columns_of_a_read() -> None:
    assert len(READ_SCHEMA) == COLUMNS_MAX


def test_encoded_properties_are_decoded_to_the_same_properties() -> None:
    assert decode_properties(encode_properties({"a": "b", "c": ""})) == {"a": "b", "c": ""}


def test_a_part_of_a_properties_text_without_separator_is_left_out() -> None:
    assert decode_properties("no separator\x02a\x01b\x02") == {"a": "b"}


def test_no_properties_have_no_text_and_a_separator_in_a_value_is_refused() -> None:
    assert properties_text({}) is None
    with pytest.raises(InvalidMessage, match="separate properties"):
        properties_text({"a": "\x02"})


def test_keys_are_joined_by_blanks_and_no_keys_have_no_text() -> None:
    assert keys_text(["a", "b"]) == "a b"
    assert keys_text([]) is None


def test_the_advice_for_a_wrong_value_names_the_closest_valid_one() -> None:
    assert valid("earlyest", ("earliest", "latest")).startswith("did you mean 'earliest'?")
    assert valid("a", ()) == "there are none"


def test_a_long_value_is_cut_in_an_error_text() -> None:
    assert len(shown("x" * 500)) == 101  # 100 characters and an ellipsis
