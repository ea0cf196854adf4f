"""Idempotency keys: what names a send, and which keys count, as a model has it."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.on_node import batch
from tests.broker.registry.state_rows import StateRows

from timeball import limits
from timeball.broker.registry import idempotency
from timeball.broker.registry.idempotency import IdempotencyKeys, KeyedSend
from timeball.errors import Conflict

KEPT_MS = 10
STEPS = st.lists(
    st.tuples(st.sampled_from(["use", "drop", "start"]), st.sampled_from("abcdef"), st.integers(0, 5)),
    max_size=30,
)


def test_content_is_the_messages_and_not_their_layout() -> None:
    rows = batch(3, body=[b"a", b"b", b"a"], tag=["x", None, "y"])
    use = idempotency.key_use("one", "key", rows)
    spread = pa.concat_batches([rows, rows]).slice(3)
    assert idempotency.key_use("one", "key", spread) == use
    assert idempotency.key_use("one", "key", rows.append_column("keys", pa.nulls(3, pa.string()))) == use
    assert idempotency.key_use("one", "key", rows.slice(1)).content != use.content
    with pytest.raises(Conflict):
        idempotency.check_same(use.content, idempotency.key_use("one", "key", rows.slice(1)))


@given(STEPS)
def test_the_newest_keys_count_before_and_after_a_start(steps: list[tuple[str, str, int]]) -> None:
    log, model, now_ms = StateRows(), dict[str, KeyedSend](), 1_000
    keys = log.opened(IdempotencyKeys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "IDEMPOTENCY_KEYS_MAX", 4)
        for step, name, passed_ms in steps:
            now_ms += passed_ms
            if step == "start":
                keys = log.opened(IdempotencyKeys)
            elif step == "drop":
                keys.drop(now_ms - KEPT_MS)
                model = {key: send for key, send in model.items() if send.store_ms > now_ms - KEPT_MS}
            elif keys.get(name, now_ms - KEPT_MS) is None:
                send = KeyedSend(len(log.appended), 1, now_ms, "content")
                change = keys.changed([(name, send)])
                log.appended.append(change.rows)
                change.keep()
                model = {key: value for key, value in model.items() if key != name} | {name: send}
                model = dict(list(model.items())[-4:])
            for key in "abcdef":
                known = model.get(key)
                is_fresh = known is not None and known.store_ms > now_ms - KEPT_MS
                assert keys.get(key, now_ms - KEPT_MS) == (known if is_fresh else None)
