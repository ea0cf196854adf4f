"""Check whether an attach is valid: whether a job's files may join the pending table, with its ranges of numbers.

Refused: a compact that does not begin at the watermark (rows would be lost or doubled), ranges that are not reserved or
were used before, files whose footers contradict the attach, and invalid due times.

A repeated attach is answered as done, because Spark repeats an epoch when it cannot know whether the first attempt
succeeded:

    compact         repeated when the watermark has passed its range
    bulk, rewrite   repeated when the job's last epoch is this one. With a digest, its rows must be the same: another
                    digest, or an epoch before the last, is another write under an old name, and refused

A job with a digest is remembered for at least JOB_KEPT_MS, because it may run again the next day. A job without a
digest has a generated name, and is repeated only while its writer waits for the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from timeball.io.files import Files
from timeball.log.checkpoint import Facts, JobFacts
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, OutOfRange, OverLimit, RequestError
from timeball.table.attachment import ANY_ROWS, Attachment
from timeball.table.data_file import DataFile
from timeball.table.file_cache import FileCache

_REPEAT_ADVICE = (
    "Other rows need another job_id, a stream a new checkpoint that begins behind what is written; "
    "option on_repeat=skip takes them for the same"
)


@dataclass(slots=True)
class AttachState:
    """The attaches and reservations so far. Rebuilt from the checkpoint and the rows after it."""

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
        """Check whether this attach is already in the log. Raise RequestError if its name was used for other rows."""
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
        """Record that the row of this attach is durable."""
        self.attach_seq = attach_seq
        if attachment.job == "compact":
            self.watermark = attachment.to_seq
        else:
            self._remember(attachment, at_ms)
        for first_seq, _ in attachment.ranges:
            self.reserved.pop(first_seq, None)

    def _remember(self, attachment: Attachment, at_ms: int) -> None:
        job_id = attachment.job_id
        # Removed first, so that the job moves to the end: the dicts are in the order of the last attach.
        last_facts = self.jobs.pop(job_id, None)
        self.epochs.pop(job_id, None)
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
        """Raise OverLimit if a new job with a digest would displace a job that must still be remembered."""
        if not attachment.digest or attachment.job_id in self.jobs or len(self.jobs) < limits.JOBS_MAX:
            return
        oldest_ms = next(iter(self.jobs.values())).at_ms
        if oldest_ms > now_ms - limits.JOB_KEPT_MS:
            raise OverLimit(
                f"{limits.JOBS_MAX} jobs have been named within {limits.JOB_KEPT_MS // limits.DAY_MS} days: write with "
                "one job_id and the option epoch, or without job_id"
            )

    def check_reserve(self, rows: int) -> None:
        """Raise InvalidMessage unless `rows` numbers may be reserved.

        Drop the oldest reservation if there are too many.
        """
        if not 0 < rows <= 1 << 40:
            raise InvalidMessage(f"reserve {rows} rows: at least one")
        if len(self.reserved) >= limits.RESERVATIONS_MAX:
            # Failed tasks leave reservations behind. The oldest ones belong to jobs that have ended.
            self.reserved.pop(next(iter(self.reserved)))

    def check(
        self, attachment: Attachment, *, durable_seq: int, is_live: Callable[[str], bool], now_ms: int
    ) -> None:
        """Raise an error unless the attach fits the state of the log and the table.

        `durable_seq`: the end of the durable log. `is_live`: whether a path is a file of the table.
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
        if attachment.from_seq != self.watermark:
            raise OutOfRange(f"compact from seq {attachment.from_seq}: the watermark is {self.watermark}")
        if not attachment.from_seq < attachment.to_seq <= durable_seq:
            raise OutOfRange(
                f"compact to seq {attachment.to_seq}: between {self.watermark + 1} and {durable_seq}"
            )

    def _check_bulk(self, attachment: Attachment) -> None:
        if len(set(attachment.ranges)) < len(attachment.ranges):
            raise OutOfRange("a range of sequence numbers is named twice")
        for first_seq, rows in attachment.ranges:
            if self.reserved.get(first_seq) != rows:
                raise OutOfRange(
                    f"{rows} rows from seq {first_seq} were not set aside for this job, or are used up"
                )
        if sum(rows for _, rows in attachment.ranges) != attachment.rows:
            raise InvalidMessage(
                f"the ranges hold {sum(r for _, r in attachment.ranges)} rows, the files {attachment.rows}"
            )
        ranges = sorted(attachment.ranges)
        for entry in attachment.files:
            # Ranges are sorted and disjoint, so only the last one that begins at or before the file can contain it.
            range_index = bisect_right(ranges, entry.min_seq, key=lambda first: first[0]) - 1
            if range_index < 0 or entry.max_seq >= ranges[range_index][0] + ranges[range_index][1]:
                raise InvalidMessage(
                    f"{entry.path}: seqs {entry.min_seq} to {entry.max_seq} lie in no range of the job"
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

    Raise InvalidDelay for due times beyond the maximum delay, and the errors of unreadable files. `cache`: the files
    are in an object store, and their footers are downloaded.
    """
    for entry in attachment.files:
        # The same limit as for a send: a bulk job must not schedule messages later than a producer can.
        if entry.min_due_ms < 0 or entry.max_due_ms > now_ms + delay_ms_max:
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
