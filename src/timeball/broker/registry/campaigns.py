r"""Campaigns of scheduled messages, and the attaches by which files join the pending table.

A campaign is the scheduled messages of one bulk attach, which can be paused, resumed and cancelled together:

    planned --attach--> running --pause--> paused --resume--> running --> finished
       \__________________\___________________\__cancel--> cancelled

A campaign is planned before its files are written. Its ranges of numbers are set in the frame that attaches the files.
While it is paused, `held_from_ms` is the due time from which on its scheduled messages are held (schedule/outcomes.py).
It is finished when all its due times have passed, which is computed and not stored. The META rows contain only the
decisions. The outcome of each scheduled message is in other rows of the log.

`AttachState` remembers the attaches of all jobs (bulk, compact, rewrite) and the reserved numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import msgspec

from timeball.broker.registry.meta import Change, MetaLog, MetaTable
from timeball.io.files import Files
from timeball.log.checkpoint import Facts, JobFacts
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, OverLimit, RequestError
from timeball.model.rules import check_campaign
from timeball.table.attachment import ANY_ROWS, Attachment
from timeball.table.data_file import DataFile
from timeball.table.object_store import FileCache

JOB_MS_MAX = 7 * limits.DAY_MS  # from the plan of a campaign to its attach. A bulk job takes minutes
RESERVED_ROWS_MAX = 1 << 40  # of one reservation

State = Literal["planned", "running", "paused", "cancelled"]


class CampaignFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The value of a campaign's META row. Times in milliseconds."""

    state: State
    since_ms: int  # when the campaign got this state
    planned_ms: int
    planned_seq: int  # end of the log at that time: all rows of the campaign come after it
    rows: int  # number of scheduled messages: as planned, then as attached
    ranges: list[tuple[int, int]] = []  # (first_seq, rows)
    # The latest due time of its scheduled messages, or -1 before the attach.
    last_due_ms: int = -1
    cancelled: int = 0  # scheduled messages ended by its cancel. The log may remove their rows
    # While the campaign is paused or being cancelled: pending scheduled messages that are due at this time or later are
    # held.
    held_from_ms: int | None = None
    # The groups of the cluster that each have a part of the campaign. A later try must distribute it in the same way.
    groups: list[str] = []

    def is_finished(self, settled_before_ms: int) -> bool:
        """Check whether all its messages are settled. All messages due before `settled_before_ms` are settled."""
        return self.state == "running" and self.last_due_ms < settled_before_ms

    def is_cancelled_for_good(self, now_ms: int) -> bool:
        """Check whether none of its messages can be delivered any more, even if this record were deleted."""
        # If messages are still held, the cancel was interrupted. Without an attach, the job may still be running, and
        # its attach must be refused.
        has_job_ended = bool(self.ranges) or self.since_ms < now_ms - JOB_MS_MAX
        return self.state == "cancelled" and self.held_from_ms is None and has_job_ended


class Campaigns:
    """All campaigns, by id. Belongs to the event loop."""

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, "campaign", CampaignFacts)

    def get(self, campaign: str) -> CampaignFacts:
        """Find a campaign. Raises InvalidMessage, NotFound."""
        facts = self._table.values.get(check_campaign(campaign))
        if facts is None:
            raise NotFound(f"no campaign {campaign!r}; `timeball campaign list` shows those there are")
        return facts

    def is_known(self, campaign: str) -> bool:
        """Check whether a campaign with this id exists. Raises InvalidMessage for an invalid id."""
        return check_campaign(campaign) in self._table.values

    def get_attached(self, campaign: str) -> CampaignFacts:
        """Find a campaign that is attached and not cancelled.

        Raises InvalidMessage for an invalid id and for a cancelled campaign, OutOfRange for a planned one, NotFound.
        """
        facts = self.get(campaign)
        if facts.state == "cancelled":
            raise InvalidMessage(f"campaign {campaign} was cancelled")
        if facts.state == "planned":
            raise OutOfRange(f"campaign {campaign} is planned, and nothing of it is attached yet")
        return facts

    def all(self) -> dict[str, CampaignFacts]:
        """List all campaigns by id, in the order in which they were planned."""
        return dict(
            sorted(self._table.values.items(), key=lambda entry: (entry[1].planned_seq, entry[1].planned_ms))
        )

    def put(self, campaign: str, facts: CampaignFacts) -> None:
        """Append the state of a campaign to the log."""
        self._table.put([(campaign, facts)])

    def build_change(self, campaign: str, facts: CampaignFacts) -> Change:
        """Build the row with the state of a campaign, for a frame with other rows."""
        return self._table.build_change([(campaign, facts)])

    def plan(
        self,
        campaign: str,
        rows: int,
        planned_ms: int,
        next_seq: int,
        settled_before_ms: int,
        groups: Sequence[str] = (),
    ) -> None:
        """Plan a campaign, unless it exists. A campaign without rows is running at once, as it has nothing to attach.

        `next_seq`: the end of the log. If there are too many campaigns, the oldest one that is over is deleted: all
        messages due before `settled_before_ms` are settled. Raises InvalidMessage for an invalid id, and OverLimit.
        """
        if self.is_known(campaign):
            return
        # The outcomes of the deleted campaign's messages stay in the log and the ledger.
        while len(self._table.values) >= limits.CAMPAIGNS_MAX:
            self._table.put([(self._find_oldest_finished(settled_before_ms, planned_ms), None)])
        state: State = "planned" if rows else "running"
        self.put(
            campaign,
            CampaignFacts(
                state=state, since_ms=planned_ms, planned_ms=planned_ms, planned_seq=next_seq, rows=rows,
                groups=list(groups),
            ),
        )  # fmt: skip

    def _find_oldest_finished(self, settled_before_ms: int, now_ms: int) -> str:
        """Find the oldest campaign that is over. Raises OverLimit if there is none."""
        for name, facts in self.all().items():
            if facts.is_cancelled_for_good(now_ms) or facts.is_finished(settled_before_ms):
                return name
        raise OverLimit(
            f"{limits.CAMPAIGNS_MAX} campaigns are not over yet: cancel those that are not needed"
        )

    def check_attach(self, attachment: Attachment) -> None:
        """Raise InvalidMessage if this attach belongs to a cancelled campaign."""
        facts = self._campaign_of(attachment)
        if facts is not None and facts.state == "cancelled":
            raise InvalidMessage(f"campaign {attachment.job_id} was cancelled")

    def attached(self, attachment: Attachment, now_ms: int) -> Change | None:
        """Build the row that makes a planned campaign running, for the frame of its attach. None for other attaches."""
        planned = self._campaign_of(attachment)
        if planned is None or planned.state != "planned":
            return None
        facts = msgspec.structs.replace(
            planned,
            state="running",
            since_ms=now_ms,
            rows=attachment.rows,
            ranges=attachment.ranges,
            last_due_ms=max((entry.max_due_ms for entry in attachment.files), default=-1),
        )
        return self.build_change(attachment.job_id, facts)

    def _campaign_of(self, attachment: Attachment) -> CampaignFacts | None:
        """Find the campaign whose files a bulk job attaches. None for a job without a campaign."""
        return self._table.values.get(attachment.job_id) if attachment.job == "bulk" else None


# ---- attaches: may the files of a job join the pending table -------------------------------------------------
# Refused: a compact that does not begin at the watermark (rows would be lost or doubled), ranges that are not reserved
# or were used before, files whose footers contradict the attach, and invalid due times.

_REPEAT_ADVICE = (
    "Other rows need another job_id, a stream a new checkpoint that begins after the written rows; "
    "option on_repeat=skip takes them for the same"
)


@dataclass(slots=True)
class AttachState:
    """The attaches and reservations so far. Rebuilt from the checkpoint and the rows after it.

    A job with a digest is remembered for at least JOB_KEPT_MS, because it may run again the next day. A job without a
    digest has a generated name, and is repeated only while its writer waits for the answer.
    """

    # All rows of the log before this sequence number have been compacted into the table.
    watermark: int = 1
    attach_seq: int = 0  # the row of the last attach
    # Jobs with a digest. The least recent attach comes first.
    jobs: dict[str, JobFacts] = field(default_factory=dict)
    # Last epochs of the jobs without a digest, in the same order.
    epochs: dict[str, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)  # first_seq -> rows

    def restore(self, facts: Facts) -> None:
        """Set the state to that of a checkpoint."""
        self.watermark, self.attach_seq = facts.watermark, facts.attach_seq
        self.jobs, self.epochs = dict(facts.jobs), dict(facts.epochs)
        self.reserved = dict(facts.reserved)

    def is_repeated(self, attachment: Attachment) -> bool:
        """Check whether this attach is already in the log. Raises RequestError if its name was used for other rows.

        A repeated attach is answered as done, because Spark repeats an epoch when it cannot know whether the first
        attempt succeeded:

            compact         repeated when the watermark has passed its range
            bulk, rewrite   repeated when the job's last epoch is this one or a later one. If both attaches have a
                            digest, the rows must be the same: another digest, or an epoch before the last one, is
                            another write under an old name, and is refused
        """
        if attachment.job == "compact":
            return attachment.from_seq < attachment.to_seq <= self.watermark
        last_facts = self.jobs.get(attachment.job_id)
        if last_facts is None:
            return self.epochs.get(attachment.job_id, -1) >= attachment.epoch
        if last_facts.epoch < attachment.epoch:
            return False
        # Without both digests the rows cannot be compared. Then the name and the epoch decide.
        if attachment.digest in ("", ANY_ROWS) or last_facts.digest == ANY_ROWS:
            return True
        if last_facts.epoch > attachment.epoch:
            raise RequestError(
                f"job {attachment.job_id} has come to epoch {last_facts.epoch}, this is {attachment.epoch}: "
                f"nothing was written. Was an old checkpoint put back? {_REPEAT_ADVICE}"
            )
        if last_facts.digest != attachment.digest:
            raise RequestError(
                f"job {attachment.job_id}, epoch {attachment.epoch} was written before, with other rows "
                f"({last_facts.digest}, now {attachment.digest}): nothing was written. {_REPEAT_ADVICE}"
            )
        return True

    def has_attached(self, job_id: str) -> bool:
        """Check whether an attach of this job is remembered."""
        return job_id in self.jobs or job_id in self.epochs

    def reserve(self, first_seq: int, rows: int) -> None:
        """Record that the row that reserves these numbers is durable."""
        self.reserved[first_seq] = rows

    def apply(self, attachment: Attachment, attach_seq: int, at_ms: int) -> None:
        """Record that the row of this attach, `attach_seq`, is durable: its ranges are no longer reserved."""
        self.attach_seq = attach_seq
        if attachment.job == "compact":
            self.watermark = attachment.to_seq
        else:
            self._remember(attachment, at_ms)
        for first_seq, _ in attachment.ranges:
            self.reserved.pop(first_seq, None)

    def _remember(self, attachment: Attachment, at_ms: int) -> None:
        """Remember a job as the last one that has attached, and forget the least recent jobs beyond the limits."""
        job_id = attachment.job_id
        # Removed first, so that the job moves to the end: the dicts are in the order of the last attach.
        last_facts = self.jobs.pop(job_id, None)
        self.epochs.pop(job_id, None)
        # A job that once had a digest stays among those with one, also if this attach has none.
        digest = attachment.digest or (ANY_ROWS if last_facts is not None else "")
        if digest:
            self.jobs[job_id] = JobFacts(attachment.epoch, at_ms, digest)
        else:
            self.epochs[job_id] = attachment.epoch
        # Forget the least recent job first, because a write is repeated soon or never.
        while len(self.jobs) > limits.JOBS_MAX:
            self.jobs.pop(next(iter(self.jobs)))
        while len(self.epochs) > limits.JOBS_UNNAMED_MAX:
            self.epochs.pop(next(iter(self.epochs)))

    def _check_job_slot(self, attachment: Attachment, now_ms: int) -> None:
        """Raise OverLimit if a new job with a digest would displace one that must still be remembered (JOB_KEPT_MS)."""
        if not attachment.digest or attachment.job_id in self.jobs or len(self.jobs) < limits.JOBS_MAX:
            return
        oldest_ms = next(iter(self.jobs.values())).at_ms
        if oldest_ms > now_ms - limits.JOB_KEPT_MS:
            raise OverLimit(
                f"{limits.JOBS_MAX} jobs have been named within {limits.JOB_KEPT_MS // limits.DAY_MS} days: write with "
                "one job_id and the option epoch, or without job_id"
            )

    def make_room_for(self, rows: int) -> None:
        """Raise InvalidMessage unless `rows` numbers may be reserved. Drops the oldest reservation beyond the limit."""
        if not 1 <= rows <= RESERVED_ROWS_MAX:
            raise InvalidMessage(f"reserve {rows} rows: 1 to {RESERVED_ROWS_MAX}")
        if len(self.reserved) >= limits.RESERVATIONS_MAX:
            # Failed tasks leave reservations behind. The oldest ones belong to jobs that have ended.
            self.reserved.pop(next(iter(self.reserved)))

    def check(
        self, attachment: Attachment, *, durable_seq: int, is_live: Callable[[str], bool], now_ms: int
    ) -> None:
        """Raise InvalidMessage, NotFound, OutOfRange or OverLimit unless the attach fits the state of log and table.

        `durable_seq`: the end of the durable log. `is_live` returns whether a path is a file of the table.
        """
        self._check_job_slot(attachment, now_ms)
        if attachment.job == "compact":
            self._check_compact(attachment, durable_seq)
        elif attachment.from_seq or attachment.to_seq:
            raise InvalidMessage(
                f"a {attachment.job} attach covers no range of the log: leave from_seq and to_seq out"
            )
        if attachment.job == "bulk":
            self._check_bulk(attachment)
        elif attachment.ranges:
            raise InvalidMessage("only a bulk attach has ranges")
        # Only a rewrite writes the rows of removed files again. Any other attach would lose them.
        if attachment.removes and attachment.job != "rewrite":
            raise InvalidMessage("only a rewrite removes files")
        for paths in (attachment.removes, [entry.path for entry in attachment.files]):
            if len(set(paths)) < len(paths):
                raise InvalidMessage("a file is named twice")
        for path in attachment.removes:
            if not is_live(path):
                raise NotFound(f"{path} is not part of the pending table")
        for entry in attachment.files:
            if is_live(entry.path):
                raise InvalidMessage(f"{entry.path} is part of the pending table already")

    def _check_compact(self, attachment: Attachment, durable_seq: int) -> None:
        """Raise OutOfRange unless the range of a compact begins at the watermark and ends within the durable log."""
        if attachment.from_seq != self.watermark:
            raise OutOfRange(f"compact from seq {attachment.from_seq}: the watermark is {self.watermark}")
        if not attachment.from_seq < attachment.to_seq <= durable_seq:
            raise OutOfRange(
                f"compact to seq {attachment.to_seq}: between {self.watermark + 1} and {durable_seq}"
            )

    def _check_bulk(self, attachment: Attachment) -> None:
        """Raise OutOfRange or InvalidMessage unless the ranges are reserved and the files use each number once."""
        if len(set(attachment.ranges)) < len(attachment.ranges):
            raise OutOfRange("a range of sequence numbers is named twice")
        for first_seq, rows in attachment.ranges:
            if self.reserved.get(first_seq) != rows:
                raise OutOfRange(
                    f"{rows} rows from seq {first_seq} were not set aside for this job, or are used up"
                )
        if sum(rows for _, rows in attachment.ranges) != attachment.rows:
            raise InvalidMessage(
                f"the ranges hold {sum(rows for _, rows in attachment.ranges)} rows, the files {attachment.rows}"
            )
        ranges = sorted(attachment.ranges)
        for entry in attachment.files:
            # Ranges are sorted and disjoint, so only the last one that begins at or before the file can contain it.
            range_index = bisect_right(ranges, entry.min_seq, key=lambda first: first[0]) - 1
            if range_index < 0 or entry.max_seq >= ranges[range_index][0] + ranges[range_index][1]:
                raise InvalidMessage(
                    f"{entry.path}: seqs {entry.min_seq} to {entry.max_seq} are in no range of the job"
                )
        # If two messages had the same number, they would be settled together, and one would be lost. The numbers of
        # rows and of reserved numbers are equal (checked above). If the files do not overlap, each number is used once.
        files = sorted(attachment.files, key=lambda entry: entry.min_seq)
        for first, second in pairwise(files):
            if second.min_seq <= first.max_seq:
                raise InvalidMessage(f"{first.path} and {second.path} both hold seq {second.min_seq}")


def check_files(
    files: Files, attachment: Attachment, *, now_ms: int, delay_ms_max: int, cache: FileCache | None = None
) -> None:
    """Open each file and compare its footer with the attach (the table's thread).

    Raises InvalidDelay for due times of a bulk job beyond the maximum delay, and the errors of unreadable files.
    `cache`: the files are in an object store, and their footers are downloaded.
    """
    for entry in attachment.files:
        # The same limit as for a send: a bulk job must not schedule messages later than a producer can. The rows of
        # other jobs were accepted before. They may be due later, because the limit was larger then, or a rule or a
        # shift has set their due time.
        if entry.min_due_ms < 0 or (attachment.job == "bulk" and entry.max_due_ms > now_ms + delay_ms_max):
            raise InvalidDelay(
                f"{entry.path}: due between {entry.min_due_ms} and {entry.max_due_ms}, beyond the maximum delay"
            )
    # Open each file now: an unreadable file must fail the attach, and not a release in a year.
    if cache is not None:
        cache.check(attachment.files)
        return
    for entry in attachment.files:
        file = DataFile(files, entry)
        file.check()
        file.close()


def check_count(attachment: Attachment) -> None:
    """Raise OverLimit if an attach names more files than fit into a row of the log."""
    if len(attachment.files) + len(attachment.removes) > limits.ATTACH_FILES_MAX:
        raise OverLimit(f"at most {limits.ATTACH_FILES_MAX} files in one attach; write larger ones")
