"""Two ways to schedule a year of messages, to call a campaign off, and to compare the counts: the client, and Spark.

`Client` needs the extra `broker` alone. `Spark` shows the commands `bulk`, `campaign cancel` and `audit`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import pyarrow as pa
from examples.flights.questions import ask

from timeball.client import Timeball
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs.campaign import Campaign

# Beside the pipeline's own Spark and the broker, on a machine that may have two cores.
CONF = {"spark.driver.memory": "512m"}
CAMPAIGN = "newsletter"


@dataclass(frozen=True)
class CalledOff:
    """A campaign's end: what its cancel said."""

    rows: int
    cancelled: int
    released: int


@dataclass(frozen=True)
class Books:
    """The accepted messages, compared with the outcomes."""

    summary: str
    counts: dict[str, Any]
    balanced: bool


class Writer(Protocol):
    """One of the two ways."""

    name: str  # who writes
    audit_name: str  # who compares

    def schedule(self, messages: pa.RecordBatch, campaign: str) -> float | None:
        """Schedule every row, or none, as one campaign.

        Returns the bytes written to the pending table for each byte of payload, or None if the log got the rows.
        """

    def call_off(self) -> CalledOff:
        """Cancel CAMPAIGN as a whole."""

    def audit(self, sent: int, rows: list[dict[str, Any]]) -> Books:
        """Compare the accepted messages with the outcomes.

        `sent`: the number of messages that the demo has sent. `rows`: the answer to questions.QUERY.
        """


class Client:
    """Sends with the client, cancels by key, and counts with SQL."""

    name, audit_name = "the client", "count in SQL"

    def __init__(self, ball: Timeball, endpoint: str) -> None:
        self._ball, self._rows = ball, 0
        # A folder that is kept may have messages already.
        self._before = _states(ask(endpoint)).total()

    def schedule(self, messages: pa.RecordBatch, campaign: str) -> float | None:
        """Send every row, with the campaign as its key."""
        column = messages.schema.get_field_index("keys")
        self._ball.send_many(messages.set_column(column, "keys", pa.repeat(campaign, messages.num_rows)))
        self._rows = messages.num_rows
        return None

    def call_off(self) -> CalledOff:
        """Cancel every message that has the campaign as its key."""
        verdicts = Counter(each.verdict for each in self._ball.cancel(key=CAMPAIGN))
        return CalledOff(self._rows, verdicts["cancelled"], verdicts["released"])

    def audit(self, sent: int, rows: list[dict[str, Any]]) -> Books:
        """Count the messages of each state in the view `scheduled`."""
        states, accepted = _states(rows), self._before + sent
        found = states.total()
        summary = (
            "balances" if found == accepted else f"DOES NOT BALANCE: {accepted:,} accepted, {found:,} found"
        )
        return Books(summary, {"accepted": accepted, **states}, found == accepted)


def _states(rows: list[dict[str, Any]]) -> Counter[str]:
    """The number of messages in each state."""
    states: Counter[str] = Counter()
    for row in rows:
        states[row["state"]] += row["messages"]
    return states


class Spark:
    """Writes DataFrames past the log into the pending table, and audits, for the length of a block."""

    name, audit_name = "Spark, from a DataFrame,", "audit on Spark"

    def __init__(self, endpoint: str, log: Path) -> None:
        from timeball.cli.spark import open_session

        self._endpoint = endpoint
        self._session = open_session("local[2]", "timeball-demo", CONF, log)

    def schedule(self, messages: pa.RecordBatch, campaign: str) -> float | None:
        """Schedule every row of a DataFrame, or none, under a campaign's name: the command `bulk`."""
        from timeball.spark.jobs.bulk import Columns, run

        frame = self._session.createDataFrame(pa.Table.from_batches([messages]))
        columns = Columns(due="due_ms", topic="topic", keys="keys", tag="tag", unique_key="unique_key")
        report = run(self._session, frame, self._endpoint, columns=columns, campaign=campaign)
        return report.amplification or 0.0

    def call_off(self) -> CalledOff:
        """End the campaign as one object: the command `campaign cancel`."""
        return cancel_campaign(self._endpoint)

    def audit(self, sent: int, rows: list[dict[str, Any]]) -> Books:
        """Compare accepted with released + cancelled + expired + pending: the command `audit`."""
        from timeball.cli.pipeline import balance
        from timeball.spark.jobs import audit

        report = audit.run(self._session, self._endpoint)
        summary = "balances" if report.ok else f"DOES NOT BALANCE: {balance(report)}"
        return Books(summary, msgspec.to_builtins(report), report.ok)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session.stop()
        except Exception:
            # A Java that was told to end as well: what ended the block is what matters.
            if error is None:
                raise


def cancel_campaign(endpoint: str) -> CalledOff:
    """Cancel CAMPAIGN, which a bulk write has created. It needs no Spark."""
    with Endpoint(endpoint) as broker:
        ended = Campaign(broker, CAMPAIGN).cancel()
    return CalledOff(ended.rows, ended.cancelled, ended.released)
