"""The answer to a send: the bytes that protobuf writes of it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from timeball.protocols.grpc._generated.service_pb2 import SendMessageResponse, SendResultEntry
from timeball.protocols.grpc.calls import OK
from timeball.protocols.grpc.codec.send_answers import SendEntry, encode_answer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
ENTRIES = st.builds(SendEntry, TEXT, TEXT, st.integers(0, 2**63 - 1), TEXT)


@given(st.lists(ENTRIES, max_size=4))
@example([SendEntry("i" * 127, "i" * 128, 127, "h" * 20_000), SendEntry("", "", 0, "")])
def test_an_answer_is_what_protobuf_writes(given_entries: list[SendEntry]) -> None:
    entries = [
        SendResultEntry(
            status=OK, message_id=each.message_id, transaction_id=each.transaction_id, offset=each.offset,
            recall_handle=each.recall_handle,
        )
        for each in given_entries
    ]  # fmt: skip
    assert encode_answer(given_entries) == SendMessageResponse(status=OK, entries=entries).SerializeToString()
