"""The hand-written encoder of send answers writes the same bytes as protobuf."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from timeball.edges.grpc._generated.service_pb2 import SendMessageResponse, SendResultEntry
from timeball.edges.grpc.calls import OK
from timeball.edges.grpc.codec.messages_in import encode_answer, encode_entry

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
ENTRY = st.tuples(TEXT, TEXT, st.integers(0, 2**63 - 1), TEXT)


@given(st.lists(ENTRY, max_size=4))
@example([("i" * 127, "i" * 128, 127, "h" * 20_000), ("", "", 0, ""), ("same", "same", 128, "")])
def test_an_encoded_answer_equals_protobuf_s(entries: list[tuple[str, str, int, str]]) -> None:
    messages = [
        SendResultEntry(
            status=OK,
            message_id=message_id,
            transaction_id=transaction_id,
            offset=offset,
            recall_handle=handle,
        )
        for message_id, transaction_id, offset, handle in entries
    ]
    encoded = encode_answer(encode_entry(*each) for each in entries)
    assert encoded == SendMessageResponse(status=OK, entries=messages).SerializeToString()
