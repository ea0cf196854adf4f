"""Header blocks: the decoder reads the blocks that hpack writes, and refuses other bytes, compiled and interpreted."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import example, given
from hypothesis import strategies as st

from timeball.edges.http2 import hpack_decoder
from timeball.edges.http2.frames import BrokenRule, Fault
from timeball.edges.http2.hpack_decoder import Headers, HpackDecoder


def interpreted() -> Any:
    """Load the decoder as it runs where no compiler was."""
    source = Path(hpack_decoder.__file__).with_name("hpack_decoder.py")
    spec = importlib.util.spec_from_file_location("interpreted_hpack_decoder", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HpackDecoder


FIELD_BYTES = 32
PSEUDO_HEADERS = {":method", ":scheme", ":authority", ":path"}
LIST_BYTES_MAX = 1_000_000
INTERPRETED = interpreted()
# Where the module is not compiled, both are interpreted.
each_decoder = pytest.mark.parametrize(
    "decoder_type", [HpackDecoder, INTERPRETED], ids=["built", "interpreted"]
)
Make = Callable[[int], HpackDecoder]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NAME = st.one_of(
    st.sampled_from([":method", ":path", "content-type", "te", "cookie", "x-mq-request-id"]),
    st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=30),
)
VALUE = st.one_of(st.sampled_from(["", "GET", "POST", "/", "trailers"]), TEXT)
TABLE = st.sampled_from([None, 0, 40, 200, 4_096])
BLOCK = st.tuples(TABLE, st.booleans(), st.lists(st.tuples(NAME, VALUE), max_size=12))


def outcome(decoder: HpackDecoder, data: bytes) -> tuple[Headers, int, bool] | Fault:
    """Decode a block, or return the error code of the rule that it breaks."""
    try:
        return (*decoder.decode(data), decoder.is_malformed)
    except BrokenRule as error:
        return error.fault


def encoded_block(encoder: Encoder, table: int | None, huffman: bool, fields: list[tuple[str, str]]) -> bytes:
    """Encode a block. With `table`, it begins with a change of the dynamic table's size."""
    if table is not None:
        encoder.header_table_size = table
    block: bytes = encoder.encode(fields, huffman=huffman)
    return block


def is_malformed(fields: list[tuple[str, str]]) -> bool:
    """Whether the pseudo-headers are not the first fields, or one is unknown or there twice."""
    names = [name for name, _ in fields]
    pseudo = [name for name in names if name.startswith(":")]
    return (
        names[: len(pseudo)] != pseudo
        or len(set(pseudo)) < len(pseudo)
        or not PSEUDO_HEADERS.issuperset(pseudo)
    )


@each_decoder
@given(blocks=st.lists(BLOCK, max_size=8))
@example(
    blocks=[(None, True, [("x", "".join(map(chr, range(256))))]), (None, False, [("x", "y"), ("x", "z")])]
)
def test_blocks_are_decoded_to_the_fields_that_were_encoded(
    decoder_type: Make, blocks: list[tuple[int | None, bool, list[tuple[str, str]]]]
) -> None:
    encoder, decoder = Encoder(), decoder_type(LIST_BYTES_MAX)
    for table, huffman, fields in blocks:
        headers, size_bytes = decoder.decode(encoded_block(encoder, table, huffman, fields))
        first: Headers = {}
        for name, value in fields:
            first.setdefault(name, value)
        assert headers == first
        sizes = [len(name.encode()) + len(value.encode()) + FIELD_BYTES for name, value in fields]
        assert size_bytes == sum(sizes)
        assert decoder.is_malformed == is_malformed(fields)


@each_decoder
@pytest.mark.parametrize(
    "fields",
    [
        [("Te", "trailers")], [(":unknown", "x")], [("te", "x"), (":path", "/")], [(":path", "/"), (":path", "/")],
        [(":status", "200")],
    ],
)  # fmt: skip
def test_names_that_no_request_may_have_make_a_block_malformed(
    decoder_type: Make, fields: list[tuple[str, str]]
) -> None:
    decoder, encoder = decoder_type(LIST_BYTES_MAX), Encoder()
    decoder.decode(encoder.encode(fields))
    assert decoder.is_malformed
    decoder.decode(encoder.encode([(":method", "GET"), (":path", "/"), ("x", "y"), ("x", "z")]))
    assert not decoder.is_malformed


def corrupt(chance: random.Random, data: bytes) -> bytes:
    """Replace, insert or delete a few bytes at one to three random positions."""
    result = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(result) + 1)
        end = min(len(result), at + chance.choice([0, 1, 1, 2]))
        result[at:end] = chance.randbytes(chance.choice([0, 1, 1, 2, 5]))
    return bytes(result)


@given(st.lists(BLOCK, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_corrupted_block_is_decoded_as_by_hpack_or_refused(
    blocks: list[tuple[int | None, bool, list[tuple[str, str]]]], chance: random.Random
) -> None:
    encoder, reference = Encoder(), Decoder(LIST_BYTES_MAX)
    built, other = HpackDecoder(LIST_BYTES_MAX), INTERPRETED(LIST_BYTES_MAX)
    for table, huffman, fields in blocks:
        data = encoded_block(encoder, table, huffman, fields)
        if chance.random() < 0.5:
            data = corrupt(chance, data)
        result = outcome(built, data)
        assert result == outcome(other, data)
        try:
            expected = reference.decode(data)
        except (HPACKError, UnicodeDecodeError):
            return  # hpack refuses more than the RFC requires, and its dynamic table is undefined afterwards
        assert not isinstance(result, Fault)
        assert result[0] == dict(reversed(expected))
        assert result[2] >= is_malformed(expected)


@each_decoder
@given(data=st.binary(max_size=60))
def test_random_bytes_are_decoded_or_break_a_rule(decoder_type: Make, data: bytes) -> None:
    result = outcome(decoder_type(1_000), data)
    assert not isinstance(result, Fault) or result in (Fault.COMPRESSION_ERROR, Fault.ENHANCE_YOUR_CALM)


INVALID_BLOCKS = [
    "80", "be", "3fe21f", "0001", "000161", "00016102", "0001617f", "00ff80808080808000", "000161817e",
    "000161847fffffff", "00016184ffffffff", "000161ffffffff07", "000161" "01ff", "8220", "5f", "1f80", "ff8080808080",
]  # fmt: skip


@each_decoder
@pytest.mark.parametrize("data", INVALID_BLOCKS)
def test_an_invalid_block_breaks_a_rule(decoder_type: Make, data: str) -> None:
    with pytest.raises(BrokenRule) as broken:
        decoder_type(LIST_BYTES_MAX).decode(bytes.fromhex(data))
    assert broken.value.fault == Fault.COMPRESSION_ERROR


@each_decoder
@pytest.mark.parametrize("data", ["0001618100", "000161821fff"])
def test_padding_of_zeros_or_of_a_whole_byte_breaks_a_rule(decoder_type: Make, data: str) -> None:
    assert outcome(decoder_type(LIST_BYTES_MAX), bytes.fromhex(data)) == Fault.COMPRESSION_ERROR


@each_decoder
def test_a_block_that_decodes_to_too_many_bytes_breaks_a_rule(decoder_type: Make) -> None:
    decoder = decoder_type(1_000)
    block = Encoder().encode([("a", "v" * 700)])
    assert decoder.decode(block)[0] == {"a": "v" * 700}
    with pytest.raises(BrokenRule) as broken:
        decoder.decode(b"\xbe" * 10_000)  # each byte stands for the field of 700 bytes
    assert broken.value.fault == Fault.ENHANCE_YOUR_CALM
