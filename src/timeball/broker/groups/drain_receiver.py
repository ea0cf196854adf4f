"""The receiving side of a drain: adopt the messages that another group hands over, each transfer exactly once.

One frame contains the SCHEDULED rows of a transfer and a META row with the transfer's number. If the sending group was
killed before it received the answer, it sends the transfer again. This group then finds the number and answers without
adoption_row it again.
"""

from __future__ import annotations

import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.policy import Policy
from timeball.broker.registry.drains import AdoptedFacts, Drains
from timeball.broker.revoking.drain_rows import build_adopted_rows, decode_sent
from timeball.broker.revoking.group_questions import AdoptHere
from timeball.io.clock import SchedulerClock
from timeball.log.writer import LogWriter
from timeball.model.access import Caller, Verb
from timeball.model.config import Settings
from timeball.model.errors import Conflict, OutOfRange


class DrainReceiver:
    """Adopts transfers from other groups. Belongs to the event loop."""

    def __init__(
        self,
        policy: Policy,
        appender: Appender,
        *,
        settings: Settings,
        clock: SchedulerClock,
        writer: LogWriter,
        drains: Drains,
    ) -> None:
        self._policy, self._appender = policy, appender
        self._settings, self._clock, self._writer, self._drains = settings, clock, writer, drains

    async def adopt(self, question: AdoptHere, caller: Caller) -> None:
        """Adopt a transfer. It is durable on return. Transfer 0 only checks whether this group would accept a drain.

        Raises Forbidden, Conflict, OutOfRange, InvalidMessage and OverLimit. Then no row of the transfer is adopted.
        """
        self._policy.allow(caller, Verb.ADMIN)
        last_transfer = self._drains.adopted(question.source)
        if last_transfer is not None and question.since_ms < last_transfer.since_ms:
            raise OutOfRange(f"group {question.source} has begun a newer drain than this one")
        if not question.transfer:
            # Not checked for a real transfer: its messages have ended in the sending group and must not be lost.
            if (own_drain := self._drains.out) is not None:
                raise Conflict(
                    f"group {self._settings.group} is drained itself, to {own_drain.heir}: name that one"
                )
            return
        if (
            last_transfer is not None
            and question.since_ms == last_transfer.since_ms
            and question.transfer <= last_transfer.transfer
        ):
            await self._writer.flushed()  # the first copy of this transfer may not be durable yet
            return
        self._append(question, 0 if last_transfer is None else last_transfer.rows)
        await self._writer.flushed()

    def _append(self, question: AdoptHere, rows_before: int) -> None:
        self._writer.check_admission()
        now_ms = self._clock.now_ms()
        scheduled_rows = build_adopted_rows(
            decode_sent(question.rows), now_ms=now_ms, host=self._settings.host
        )
        self._appender.make_topics(
            scheduled_rows
        )  # the topics' own META rows must precede the rows that use them
        rows = self._appender.prepare(scheduled_rows, now_ms)
        facts = AdoptedFacts(
            since_ms=question.since_ms, transfer=question.transfer, rows=rows_before + rows.num_rows
        )
        change = self._drains.adoption_row(question.source, facts)
        # No await between the check in `adopt` and the append. Otherwise two copies of a transfer that arrive at the
        # same time would both be adopted.
        self._appender.append(pa.concat_batches([rows, change.rows]))
        change.keep()
