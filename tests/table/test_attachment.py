"""Tests of timeball.table.attachment: encoding and decoding, and errors that name malformed fields."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.model import limits
from timeball.model.errors import InvalidMessage, OverLimit
from timeball.table.attachment import Attachment, FileEntry, Reservation, decode, decode_change, encode

COUNTS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = ("rows", "size_bytes", "min_due_ms", "max_due_ms", "min_seq", "max_seq")


@st.composite
def entries(draw: st.DrawFn) -> FileEntry:
    bucket, name = draw(st.from_regex(r"[0-9T-]{7,13}", fullmatch=True)), draw(st.uuids()).hex
    numbers = {field: draw(COUNTS) for field in NUMBERS}
    return FileEntry(path=f"bucket={bucket}/{name}.parquet", bucket=bucket, **numbers)


ATTACHMENTS = st.builds(
    Attachment,
    job=st.sampled_from(["compact", "bulk", "rewrite"]),
    job_id=TEXTS,
    epoch=COUNTS,
    files=st.lists(entries(), max_size=4),
    removes=st.lists(TEXTS, max_size=4),
    from_seq=COUNTS,
    to_seq=COUNTS,
    ranges=st.lists(st.tuples(COUNTS, COUNTS), max_size=4),
)
FILE_NAME = "0123456789abcdef" * 2
ENTRY = FileEntry(
    path=f"bucket=2026-11/{FILE_NAME}.parquet", bucket="2026-11", rows=3, size_bytes=99,
    min_due_ms=1, max_due_ms=2, min_seq=4, max_seq=6,
)  # fmt: skip


def with_path(path: str) -> bytes:
    """Encode an attach of a file with this path."""
    entry = msgspec.structs.replace(ENTRY, path=path)
    return encode(Attachment(job="bulk", job_id="j", epoch=1, files=[entry]))


@given(ATTACHMENTS)
def test_encoded_attachment_decodes_to_itself(attachment: Attachment) -> None:
    assert decode(encode(attachment)) == decode_change(encode(attachment)) == attachment


def test_a_reservation_is_decoded_from_the_log_but_refused_as_an_attach() -> None:
    assert decode_change(encode(Reservation(7))) == Reservation(7)
    with pytest.raises(InvalidMessage):
        decode(encode(Reservation(7)))


@given(st.binary(max_size=60) | st.just(b'{"x":' + b"[" * 3_000) | st.just(b'{"job_id":"\xff"}') | st.recursive(
    st.none() | st.booleans() | COUNTS | TEXTS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["job", "job_id", "epoch", "files", "ranges"]) | TEXTS, inner, max_size=5),
).map(msgspec.json.encode))  # fmt: skip
def test_malformed_attachment_raises_only_invalid_message(data: bytes) -> None:
    try:
        assert isinstance(decode(data), Attachment)
    except InvalidMessage as error:
        assert "not an attachment" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", "copy"), ("job", None), ("job_id", 7), ("epoch", "1"), ("epoch", 1.5), ("epoch", None),
        ("epoch", 1 << 63), ("ranges", [[1, 1 << 63]]),
        ("files", {}), ("files", [{}]), ("ranges", [[1]]), ("ranges", [[1, 2, 3]]), ("removes", [1]),
    ],
)  # fmt: skip
def test_field_of_wrong_type_is_named_in_the_error(field: str, value: object) -> None:
    valid = msgspec.json.decode(encode(Attachment(job="bulk", job_id="j", epoch=1, files=[ENTRY])))
    with pytest.raises(InvalidMessage, match=rf"\$\.{field}"):
        decode(msgspec.json.encode({**valid, field: value}))


@pytest.mark.parametrize("field", ["job", "job_id", "epoch"])
def test_attachment_without_job_job_id_or_epoch_is_refused(field: str) -> None:
    fields = msgspec.json.decode(encode(Attachment(job="bulk", job_id="j", epoch=1)))
    del fields[field]
    with pytest.raises(InvalidMessage, match=field):
        decode(msgspec.json.encode(fields))


@pytest.mark.parametrize(
    "path",
    [
        "", f"{FILE_NAME}.parquet", f"../{FILE_NAME}.parquet", f"/bucket=2026-11/{FILE_NAME}.parquet",
        f"bucket=2026-11/../{FILE_NAME}.parquet", f"bucket=2026-11/{FILE_NAME}", f"bucket=2026-11/{FILE_NAME}.csv",
        f"bucket=2026-11/{FILE_NAME}.parquet\n", f"bucket=2026-11/{FILE_NAME}\0.parquet",
        "bucket=2026-11/part-0.parquet",  # the file name must be unique in all buckets, so it is random
        f"bucket=2026-12/{FILE_NAME}.parquet",  # not the bucket of the entry
    ],
)  # fmt: skip
def test_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(InvalidMessage, match="relative to the table"):
        decode(with_path(path))


def test_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTACH_FILES_MAX", 3)
    files = [ENTRY] * 3
    assert decode(encode(Attachment(job="bulk", job_id="j", epoch=1, files=files))).files == files
    with pytest.raises(OverLimit, match="4 files in one attach; at most 3"):
        decode(encode(Attachment(job="bulk", job_id="j", epoch=1, files=[*files, ENTRY])))


@given(st.lists(st.integers(0, 1 << 40), max_size=5))
def test_rows_is_the_sum_over_all_files(rows: list[int]) -> None:
    files = [msgspec.structs.replace(ENTRY, rows=count) for count in rows]
    assert Attachment(job="bulk", job_id="j", epoch=1, files=files).rows == sum(rows)
