"""The heir's side of a drain: take over what another group hands over, each transfer once.

The promises of a transfer, and the META row that says which transfer they were, are one frame. So a transfer that is
sent again, by a group that was killed before it heard the answer, is answered as done.
"""

from __future__ import annotations

import pyarrow as pa

from timeball.access import Caller, Verb
from timeball.broker.appender import Appender
from timeball.broker.components import Components
from timeball.broker.handed_rows import adopted_rows, decode_sent
from timeball.broker.policy import Policy
from timeball.broker.registry.drains import AdoptedFacts
from timeball.broker.revoking.group_questions import AdoptHere
from timeball.errors import Conflict, OutOfRange


class Adoption:
    """Takes transfers over. Belongs to the event loop."""

    def __init__(self, parts: Components, policy: Policy, appender: Appender) -> None:
        self._parts, self._policy, self._appender = parts, policy, appender

    async def adopt(self, question: AdoptHere, caller: Caller) -> None:
        """Take a transfer over; durable on return. Transfer 0 only asks whether this group would.

        Raises Forbidden, Conflict, OutOfRange, InvalidMessage and OverLimit, and has then taken over nothing of it.
        """
        parts = self._parts
        self._policy.allow(caller, Verb.ADMIN)
        known = parts.drains.adopted(question.source)
        if known is not None and question.since_ms < known.since_ms:
            raise OutOfRange(f"an older drain of group {question.source} than the last one")
        if not question.transfer:
            # Of a transfer this is not asked: it has ended there, so it must find a place here.
            if (out := parts.drains.out) is not None:
                raise Conflict(
                    f"group {parts.settings.group} is drained itself, to {out.heir}: name that one"
                )
            return
        if known is not None and question.since_ms == known.since_ms and question.transfer <= known.transfer:
            await parts.writer.flushed()  # the first try may be on its way to the disk
            return
        self._append(question, 0 if known is None else known.rows)
        await parts.writer.flushed()

    def _append(self, question: AdoptHere, rows_before: int) -> None:
        parts = self._parts
        parts.writer.check_room()
        now_ms = parts.clock.now_ms()
        promises = adopted_rows(decode_sent(question.rows), now_ms=now_ms, host=parts.settings.host)
        self._appender.make_topics(promises)  # META rows of their own, before those that need them
        rows = self._appender.prepare(promises, now_ms)
        facts = AdoptedFacts(
            since_ms=question.since_ms, transfer=question.transfer, rows=rows_before + rows.num_rows
        )
        change = parts.drains.adopting(question.source, facts)
        # No pause between look and append: the same transfer, sent twice at once, is taken over once.
        self._appender.append(pa.concat_batches([rows, change.rows]))
        change.keep()
