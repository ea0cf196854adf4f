"""Cancel of pending scheduled messages, by name or with a recall handle, with a definite verdict for each.

    cancelled           it was pending, and will never be delivered; the CANCEL row is durable
    rescheduled         it was pending, and now has another due time (reschedule.py)
    already_cancelled   another request cancelled it first
    released            too late: its release is in the log, stored at `at_ms`
    expired             it is no longer pending; retention has removed the row that ended it
    not_found           this broker finds no scheduled message with that name

In this package, "settle" means: end a scheduled message, or give it another due time.

The schedule decides the race with the due time and with other requests. It does so on the event loop, in the order in
which rows are appended to the log. A message whose release has begun cannot be cancelled, and a cancelled message is
not released. There is no third case (G7).

A name may stand for any number of messages. They are settled in slices (`in_slices`), each in one step, so that other
requests and releases do not wait. All slices are durable before the answer. Requests that name one id each, and arrive
together, share a look-up and a commit (`LoneCancels`).

If another request settled the scheduled message first, the lookup is repeated once that request's row is durable. If
that request moved the message, this one tries to settle it at its new due time. Each repetition means that another
request made progress. Each verdict was true at some time between call and answer. All verdicts name a scheduled message
by its number, which never changes.

A pending message that a selection has cancelled (registry/selections.py) counts as cancelled. A cancel by name
appends its CANCEL row all the same, so that an undo of the selection does not change it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker.accepting.appender import Appender
from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.recurring.successors import Successors
from timeball.broker.registry.rates import Rates, Stat
from timeball.broker.registry.redeliveries import Redeliveries
from timeball.broker.registry.tables import Drains
from timeball.broker.registry.topics import Topics
from timeball.broker.revoking.scheduled_lookup import (
    CANCELLED,
    Candidate,
    Change,
    LookupResult,
    LookUps,
    Names,
    Owner,
    due_version_columns,
)
from timeball.io.clock import SchedulerClock
from timeball.io.threads import SLICE_ROWS, in_slices, in_thread
from timeball.log.reader import LogReader
from timeball.model import limits
from timeball.model.access import Caller
from timeball.model.answers import HANDED, Verdict
from timeball.model.config import Settings
from timeball.model.errors import InvalidMessage, NotFound, TimeballError
from timeball.model.message import (
    CANCEL_REASON,
    CANCELLED_BY,
    Kind,
    LogRow,
    build_rows,
    cancel_row,
    encode_properties,
)
from timeball.schedule.outcomes import Outcomes
from timeball.schedule.scheduler import Scheduler

# Settles the candidates that are still pending, durably, and adds their verdicts to a dict, by number. Candidates that
# are no longer pending get no verdict.
Act = Callable[[Sequence[Candidate], dict[int, Verdict]], Awaitable[None]]
# Slices of CANCEL rows that wait for the disk at the same time.
SLICES_IN_FLIGHT_MAX = 16
FEW_ROWS = 64  # for more rows, columns cost less


async def settle(look_ups: LookUps, names: Names, act: Act, *, ends_selected: bool = False) -> list[Verdict]:
    """Look up the names, and call `act` for the messages that are not settled yet.

    `ends_selected`: call it also for messages that a selection has cancelled. Returns the verdicts of all messages
    found, and a verdict for each name without a message (`list_verdicts`).

    Raises OutOfRange for too many names, InvalidMessage for an invalid key, and the errors of `LookUps.look_up` and
    `act`.
    """
    names.check()
    async with look_ups.gate.passing():
        lookup = await look_ups.look_up_present(names)
        return await settle_found(look_ups, names, lookup, act, ends_selected=ends_selected)


async def settle_found(
    look_ups: LookUps, names: Names, lookup: LookupResult, act: Act, *, ends_selected: bool = False
) -> list[Verdict]:
    """Continue `settle` with the result of the look-up. The caller holds the gate.

    Removes the candidates from `lookup`, and adds those that selections have cancelled to `lookup.selected`.
    """
    verdicts, remaining = await look_ups.work_through(lookup, _split_settled, lookup)
    while remaining:
        # This request holds the gate, so no selection can change before `act`.
        change_by_number = await look_ups.select(remaining)
        selected = {
            number: change.owner for number, change in change_by_number.items() if change.owner is not None
        }
        if selected:
            ended = await _settle_selected(remaining, selected, verdicts, act if ends_selected else None)
            look_ups.count_cancelled_by_name(selected[number] for number in ended)
            lookup.selected.update(selected)
        # `act` decides on the event loop. So a message without a verdict is no longer pending as it was found: it was
        # released, cancelled or moved meanwhile, or is being released now.
        await act(with_changes(remaining, change_by_number) if change_by_number else remaining, verdicts)
        unsettled: list[Candidate] = []
        async for candidates in in_slices(remaining):
            unsettled += [candidate for candidate in candidates if candidate.number not in verdicts]
        remaining = await recheck_unsettled(look_ups, unsettled, verdicts)
    return await look_ups.work_through(lookup, _list_and_free, names.subjects, lookup, verdicts)


def with_changes(candidates: Sequence[Candidate], changes: Mapping[int, Change]) -> list[Candidate]:
    """Set `change` of the candidates in `changes`, by number. Leave out messages that selections have cancelled."""
    return [
        candidate if change is None else msgspec.structs.replace(candidate, change=change)
        for candidate in candidates
        if (change := changes.get(candidate.number)) is None or change.owner is None
    ]


async def _settle_selected(
    remaining: Sequence[Candidate],
    selected: dict[int, Owner],
    verdicts: dict[int, Verdict],
    end: Act | None,
) -> dict[int, Verdict]:
    """Add the verdict `already_cancelled` for the messages in `selected`, which selections have cancelled.

    `end`, if given, also appends their CANCEL rows, so that no undo makes them pending again. Returns the verdicts that
    `end` gave.
    """
    chosen = [candidate for candidate in remaining if candidate.number in selected]
    ended = dict[int, Verdict]()
    if end is not None:
        await end(chosen, ended)
        # Messages without a verdict became due meanwhile, and so got a CANCEL row. The next look-up finds that row.
        chosen = [candidate for candidate in chosen if candidate.number in ended]
    for number in [candidate.number for candidate in chosen]:
        verdicts[number] = Verdict("", CANCELLED, number, selected[number].facts.at_ms)
    return ended


def _split_settled(lookup: LookupResult) -> tuple[dict[int, Verdict], list[Candidate]]:
    """Build the verdicts of the messages that are settled already, by number, and list each other message once."""
    verdicts = {number: Verdict("", end.verdict, number, end.at_ms) for number, end in lookup.settled.items()}
    # By number: a message may be found by its id and by its key, but is settled once.
    remaining = {
        candidate.number: candidate for candidate in lookup.candidates if candidate.number not in verdicts
    }
    return verdicts, list(remaining.values())


def _list_and_free(
    subjects: Sequence[str], lookup: LookupResult, verdict_by_number: dict[int, Verdict]
) -> list[Verdict]:
    """List the verdicts (`list_verdicts`), then empty the other two arguments part by part.

    To free a million objects at once would stop all threads, because the interpreter is locked meanwhile.
    """
    verdicts = list_verdicts(subjects, lookup, verdict_by_number)
    while lookup.candidates:
        del lookup.candidates[-SLICE_ROWS:]
    while verdict_by_number:
        verdict_by_number.popitem()
    return verdicts


class _LoneCancel(NamedTuple):
    """A request to cancel the messages with one id."""

    message_id: str
    topic: str | None
    caller: Caller
    may: Callable[[str], bool] | None  # the topics whose messages the caller may cancel; None: all


class LoneCancels:
    """Cancels of one id each: those that arrive together share a look-up and a commit. Belongs to the event loop."""

    def __init__(self, look_ups: LookUps, act_for: Callable[[Caller], Act]) -> None:
        """`act_for` returns the `Act` that cancels for a caller."""
        self._look_ups, self._act_for = look_ups, act_for
        self._batcher: AsyncBatcher[_LoneCancel, list[Verdict] | None] = AsyncBatcher(
            self._cancel_together, SLICE_ROWS
        )

    def put(
        self, message_id: str, topic: str | None, caller: Caller, may: Callable[[str], bool] | None
    ) -> asyncio.Future[list[Verdict] | None]:
        """Cancel the messages with this id, as `settle` does. None if the caller must call `settle` itself.

        The result is None, and nothing was cancelled, if the shared look-up failed or found too many messages, or if an
        earlier request of the same batch names the same id. Raises errors that occur after the look-up.
        """
        return self._batcher.put(_LoneCancel(message_id, topic, caller, may))

    async def _cancel_together(self, requests: list[_LoneCancel]) -> Sequence[list[Verdict] | None]:
        """Cancel for several requests. Returns for each request the result of `put`, in their order."""
        results: list[list[Verdict] | None] = [None] * len(requests)
        # The index of the request for each id, by topic and caller.
        groups: dict[tuple[str | None, Caller], dict[str, int]] = {}
        for index, request in enumerate(requests):
            # A second request for an id gets None and goes alone, because its verdict depends on that of the first.
            groups.setdefault((request.topic, request.caller), {}).setdefault(request.message_id, index)

        async def cancel_group(topic: str | None, caller: Caller, index_by_id: dict[str, int]) -> None:
            """Cancel the messages with these ids, and add their verdicts to `results`."""
            # `may` depends only on the caller, so that of the first request is that of all.
            may = requests[next(iter(index_by_id.values()))].may
            for verdict in await self._settle_few(Names([*index_by_id], topic=topic, may=may), caller):
                index = index_by_id[verdict.subject]
                results[index] = [*(results[index] or ()), verdict]

        await asyncio.gather(*(cancel_group(*key, index_by_id) for key, index_by_id in groups.items()))
        return results

    async def _settle_few(self, names: Names, caller: Caller) -> list[Verdict]:
        """Cancel the messages with these names. Returns their verdicts.

        Cancels nothing and returns [] if more than SLICE_ROWS messages are found, or if the look-up failed.
        """
        has_acted = False

        async def act(candidates: Sequence[Candidate], verdicts: dict[int, Verdict]) -> None:
            """Cancel these messages (an `Act`), and remember that an attempt was made."""
            nonlocal has_acted
            has_acted = True
            await self._act_for(caller)(candidates, verdicts)

        try:
            async with self._look_ups.gate.passing():
                lookup = await self._look_ups.look_up_present(names)
                if len(lookup.candidates) > SLICE_ROWS:
                    return []
                # Also reads the rows of messages that a selection may cover.
                return await settle_found(self._look_ups, names, lookup, act, ends_selected=True)
        except TimeballError:
            # A second attempt would find the messages cancelled in memory, although their rows may not be durable.
            if has_acted:
                raise
            return []  # each request is repeated alone, so that only the one with the error is refused


async def cancel(
    appender: Appender,
    candidates: Sequence[Candidate],
    verdicts: dict[int, Verdict],
    *,
    by: str = "",
    clock: SchedulerClock,
    redeliveries: Redeliveries,
    scheduler: Scheduler,
    successors: Successors,
    rates: Rates,
) -> None:
    """Cancel the pending ones of these messages, durably (an `Act`). A message that is not pending gets no verdict.

    `by`: the account that requests the cancel. The CANCEL rows name it. If an occurrence of a recurring schedule is
    cancelled, the next one is in the same frame. Raises the errors of the append.
    """
    commits: deque[asyncio.Future[int]] = deque()
    # A request that is interrupted has cancelled its first slices, and may be repeated.
    async for part in _cancel_slices(candidates, successors):
        now_ms = clock.now_ms()
        was_pending = cancel_pending(part, scheduler=scheduler).tolist()
        pending = [candidate for candidate, is_pending in zip(part, was_pending, strict=True) if is_pending]
        if not pending:
            continue
        numbers = [candidate.number for candidate in pending]
        # An operator may name a retry topic. The redelivery counts of its messages end with the messages.
        redeliveries.end(np.array(numbers, dtype=np.int64))
        # No await since the decision: the CANCEL rows stand in the log before any later release.
        continuation = successors.after_end(numbers, now_ms)
        commits.append(
            appender.append_few(cancel_rows(pending, now_ms, by))
            if len(pending) <= FEW_ROWS and continuation is None
            else appender.append(cancel_columns(pending, now_ms, by), continuation=continuation).durable
        )
        rates.add_each(Stat.CANCELLED_NUMS, (candidate.topic for candidate in pending))
        verdicts.update((number, Verdict("", "cancelled", number, now_ms)) for number in numbers)
        if len(commits) > SLICES_IN_FLIGHT_MAX:
            await commits.popleft()
    for durable in commits:
        await durable


async def _cancel_slices(
    candidates: Sequence[Candidate], successors: Successors
) -> AsyncIterator[Sequence[Candidate]]:
    """Yield the candidates in slices that have few occurrences of schedules. Other tasks run between two slices."""
    async for candidate_slice in in_slices(candidates):
        for part in successors.parts([candidate.number for candidate in candidate_slice]):
            if part.start:
                await asyncio.sleep(0)
            yield candidate_slice[part]


def cancel_pending(candidates: Sequence[Candidate], *, scheduler: Scheduler) -> npt.NDArray[np.bool_]:
    """Cancel the pending ones of these messages in the schedule. The result is True where a candidate was pending.

    The caller must append their CANCEL or MOVED rows before its next await.
    """
    return scheduler.cancel(*due_version_columns(candidates))


def cancel_rows(chosen: Sequence[Candidate], now_ms: int, by: str = "") -> list[LogRow]:
    """Build the CANCEL rows of these scheduled messages, as values of LOG_SCHEMA. `by`: the requesting account."""
    properties = cancel_properties(by)
    return [
        cancel_row(
            topic=candidate.topic, source_seq=candidate.number, due_seq=candidate.seq, due_ms=candidate.due_ms,
            store_ms=now_ms, keys=candidate.keys, unique_key=candidate.unique_key, properties=properties,
            accepted_ms=candidate.accepted_ms,
        )
        for candidate in chosen
    ]  # fmt: skip


def cancel_columns(
    chosen: Sequence[Candidate], now_ms: int, by: str = "", reason: str = ""
) -> pa.RecordBatch:
    """Build the rows of `cancel_rows` as columns of LOG_SCHEMA. The rows also have the `reason`."""
    due_ms, version = due_version_columns(chosen)
    number = np.array([candidate.number for candidate in chosen], dtype=np.int64)
    return build_rows(
        len(chosen),
        kind=int(Kind.CANCEL),
        queue_id=-1,
        store_ms=now_ms,
        source_seq=number,
        version_seq=pa.array(version, mask=version == number),
        properties=cancel_properties(by, reason),
        due_ms=due_ms,
        **{
            name: [getattr(candidate, name) for candidate in chosen]
            for name in ("topic", "keys", "unique_key", "accepted_ms")
        },
    )


def cancel_properties(by: str = "", reason: str = "") -> str | None:
    """Build the properties of a CANCEL row: the account that requests it, and the reason. None if both are empty."""
    properties = {name: value for name, value in ((CANCELLED_BY, by), (CANCEL_REASON, reason)) if value}
    return encode_properties(properties) if properties else None


def list_verdicts(
    subjects: Iterable[str], lookup: LookupResult, verdict_by_number: dict[int, Verdict]
) -> list[Verdict]:
    """List the verdicts of all messages found, in the order of `subjects`, the requested names.

    The messages of one name: those settled by this request first, then the others, each from the newest to the oldest.
    A name without messages has one verdict, `not_found` or `expired`. `verdict_by_number` has a verdict for each
    candidate.
    """
    by_subject: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in lookup.candidates:
        by_subject[candidate.subject].append(candidate)
    verdicts = list[Verdict]()
    cancelled_numbers = set[int]()  # messages whose verdict `cancelled` is in `verdicts`
    for subject in subjects:
        settled_now, settled_before = list[Verdict](), list[Verdict]()
        for candidate in by_subject.get(subject, []):
            outcome = verdict_by_number[candidate.number]
            # For a message named twice, the second verdict is `already_cancelled`.
            word = CANCELLED if candidate.number in cancelled_numbers else outcome.verdict
            if _is_superseded(candidate, word, outcome.at_ms, by_subject[subject]):
                continue
            if word == "cancelled":
                cancelled_numbers.add(candidate.number)
            settled = settled_now if word in ("cancelled", "rescheduled") else settled_before
            settled.append(Verdict(subject, word, outcome.seq, outcome.at_ms, outcome.due_ms))
        # Every name gets a verdict, even if it has no scheduled message.
        verdicts += [*_newest_first(settled_now), *_newest_first(settled_before)] or [
            _missing_verdict(subject, lookup)
        ]
    return verdicts


def _newest_first(verdicts: list[Verdict]) -> list[Verdict]:
    """Sort verdicts by the number of their message, the highest first."""
    if len(verdicts) < 2:
        return verdicts
    # Unlike `sort`, numpy does not hold the interpreter.
    numbers = np.fromiter((verdict.seq or 0 for verdict in verdicts), np.int64, len(verdicts))
    return [verdicts[index] for index in np.argsort(-numbers, kind="stable").tolist()]


def _is_superseded(
    candidate: Candidate, verdict: str, at_ms: int | None, others: Sequence[Candidate]
) -> bool:
    """Check whether a message is left out, because its producer used the id again and the caller means the later one.

    This applies only to a message whose end has no time (`at_ms` None), because the log no longer has the row that
    ended it. `others`: the candidates of the same name.
    """
    if verdict not in (CANCELLED, "expired") or at_ms is not None or candidate.unique_key is None:
        return False
    return any(
        other.unique_key == candidate.unique_key and other.number > candidate.number for other in others
    )


def _missing_verdict(subject: str, lookup: LookupResult) -> Verdict:
    """Build the verdict of a name without a message: `not_found`, or `expired` for a number that was in use."""
    seq = lookup.expired_numbers.get(subject)
    return Verdict(subject, "not_found" if seq is None else "expired", seq)


async def recheck_unsettled(
    look_ups: LookUps, unsettled: Sequence[Candidate], verdicts: dict[int, Verdict]
) -> list[Candidate]:
    """Look up again the messages that `act` did not settle, and add the verdicts of those that ended to `verdicts`.

    Returns the other messages, which have moved to another due time or another row, at their new places. The caller
    tries them again.
    """
    if not unsettled:
        return []
    # Each was settled since the lookup, and its row may not be durable yet. After the flush a lookup finds the row.
    await look_ups.writer.flushed()
    remaining = list[Candidate]()
    for begin in range(0, len(unsettled), limits.CANCELS_PER_REQUEST_MAX):
        part = unsettled[begin : begin + limits.CANCELS_PER_REQUEST_MAX]
        lookup = await look_ups.look_up(Names(seqs=[candidate.number for candidate in part]), thorough=True)
        current_by_number = {candidate.number: candidate for candidate in lookup.candidates}
        async for candidates in in_slices(part):
            for before in candidates:
                number = before.number
                current, end = current_by_number.get(number), lookup.settled.get(number)
                if end is not None:
                    verdicts[number] = Verdict("", end.verdict, number, end.at_ms)
                elif current is not None and (current.seq, current.at_seq) != (before.seq, before.at_seq):
                    remaining.append(current)  # it was moved, or retention removed the row with its body
                else:
                    verdicts[number] = _remembered_verdict(look_ups.outcomes, before)
    return remaining


def _remembered_verdict(outcomes: Outcomes, candidate: Candidate) -> Verdict:
    """Build the verdict of a message that is not pending, and for which the log has no RELEASE or CANCEL row.

    `already_cancelled` if the schedule still remembers a cancel, which it does until the due time, else `expired`.
    """
    was_cancelled = bool(outcomes.was_cancelled(*due_version_columns([candidate]))[0])
    return Verdict("", CANCELLED if was_cancelled else "expired", candidate.number)


# ---- recall: cancel with the handle that the send returned ---------------------------------------------------
# Both RocketMQ protocols use it. A handle contains the message's id, so it also finds a message that was moved. Only
# its due time is outdated then.

VERSION = "v1"  # of RocketMQ's handles
ITEMS = 5  # of a handle, with the version
HANDLE_CHARACTERS_MAX = 2_048  # checked before the text is decoded: names and ids are far shorter


class Handle(NamedTuple):
    """The message that a recall handle names. Its text:

        base64url( "v1" topic broker-name timestamp-ms unique-key )   one blank between two items, with padding

    The handle has RocketMQ's form, because its remoting clients decode it to find the broker. Only gRPC clients pass it
    on unread. A decoder must ignore items after the fifth. The timestamp is the due time itself. (RocketMQ adds 1 ms,
    so that its wheel rounds it to the right slot. Timeball finds the scheduled message by its key.)
    """

    topic: str
    broker_name: str  # RocketMQ's clients send the recall to this broker
    timestamp_ms: int  # the due time when the handle was made
    unique_key: str  # the message's id


def encode_handle(topic: str, broker_name: str, due_ms: int, unique_key: str) -> str:
    """Encode the handle of a pending message. "" if an item is empty or contains a blank."""
    text = f"{VERSION} {topic} {broker_name} {due_ms} {unique_key}"
    if text.count(" ") != ITEMS - 1 or not (topic and broker_name and unique_key):
        return ""
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_handle(text: str) -> Handle:
    """Decode a handle, with or without base64 padding. Raises InvalidMessage."""
    if len(text) > HANDLE_CHARACTERS_MAX:
        raise InvalidMessage(
            f"a recall handle of {len(text)} characters; {HANDLE_CHARACTERS_MAX} is the most"
        )
    # Some clients remove the padding.
    padding = "=" * (-len(text) % 4)
    try:
        items = base64.b64decode(text + padding, altchars=b"-_", validate=True).decode().split(" ")
        version, topic, broker_name, timestamp, unique_key = items[:ITEMS]
        if version != VERSION or not timestamp.isascii() or not timestamp.isdigit():
            raise ValueError
    except (ValueError, binascii.Error) as error:  # also for text that is not UTF-8, or has too few items
        raise InvalidMessage(f"recall handle {text[:64]!r} is invalid") from error
    return Handle(topic, broker_name, int(timestamp), unique_key)


SETTLED = ("cancelled", CANCELLED)  # the verdicts with which a recall succeeds
HANDED_OVER_TEXT = "the message was handed over to another group of the cluster: recall it there"


class RecallRefused(Exception):
    """The message was not cancelled. `verdict`: released, expired, not_found or handed.

    `at_ms`: when the message ended, if known. `sentence`: the reason, for the user.
    """

    def __init__(self, verdict: str, at_ms: int | None, sentence: str) -> None:
        super().__init__(sentence)
        self.verdict, self.at_ms, self.sentence = verdict, at_ms, sentence


async def recall(
    look_ups: LookUps,
    act: Act,
    topic: str,
    handle_text: str,
    *,
    settings: Settings,
    reader: LogReader,
    topics: Topics,
    drains: Drains,
    reader_thread: Executor,
) -> str:
    """Cancel the message that a handle names, and return its id. `act`: `cancel` on behalf of the requesting account.

    Success means that the message is cancelled, durably, and will not be delivered. A second recall succeeds too. A
    handle that is too late, unknown, or older than the broker remembers is refused, and the error text states which.
    (RocketMQ stores a deletion mark without a search for the message, so each recall before the due time succeeds.)

    Raises NotFound for an unknown topic, InvalidMessage for an invalid handle or a handle of another topic or broker,
    and RecallRefused if the message cannot be cancelled.
    """
    if topics.find_topic(topic) is None:
        raise NotFound(f"topic[{topic}] not exist")
    handle = decode_handle(handle_text)
    if handle.topic != topic:
        raise InvalidMessage("recall handle belongs to another topic")
    if handle.broker_name != settings.broker_name:
        raise InvalidMessage("recall handle belongs to another broker")
    # Limited to the topic, because producers of other topics may use the same id.
    names = Names(ids=[handle.unique_key], topic=topic)
    async with look_ups.gate.passing():
        # Not `look_up_present`: the handle has the topic of the send, so a message that a selection has moved to this
        # topic has a handle with another topic.
        lookup = await look_ups.look_up(names)
        verdicts = await settle_found(look_ups, names, lookup, act, ends_selected=True)
    # An id may belong to several messages, if its producer used it twice. All of them must be settled.
    for verdict in verdicts:
        # An earlier cancel counts as success, because a recall that is repeated after a lost answer must succeed.
        if verdict.verdict not in SETTLED or _is_handed_over(verdict, drains=drains):
            raise await _explain_refusal(
                handle, verdict, reader=reader, drains=drains, reader_thread=reader_thread
            )
    return handle.unique_key


def _is_handed_over(verdict: Verdict, *, drains: Drains) -> bool:
    """Check whether the message of a verdict was, or may have been, moved to another group of the cluster."""
    return drains.was_handed_over(verdict.verdict, verdict.at_ms)


async def _explain_refusal(
    handle: Handle, verdict: Verdict, *, reader: LogReader, drains: Drains, reader_thread: Executor
) -> RecallRefused:
    """Build the error for a message that was not cancelled. `verdict` tells its state."""
    if verdict.verdict == "released":
        return RecallRefused(
            "released", verdict.at_ms, f"too late, the message was delivered at {verdict.at_ms}"
        )
    if _is_handed_over(verdict, drains=drains):
        return RecallRefused(HANDED, verdict.at_ms, HANDED_OVER_TEXT)
    # If the handle's due time is older than the log, the log may have lost the message: so `expired`, not `not_found`.
    oldest_store_ms = await in_thread(reader_thread, _oldest_store_ms, reader=reader)
    if verdict.verdict == "expired" or handle.timestamp_ms <= oldest_store_ms:
        return RecallRefused(
            "expired",
            None,
            f"too late, the log keeps outcomes of messages only since {oldest_store_ms}",
        )
    return RecallRefused("not_found", None, "no pending message matches the handle")


def _oldest_store_ms(*, reader: LogReader) -> int:
    """Read the store time of the log's oldest row, in ms. 0 while retention has removed nothing (reader thread)."""
    first_seq = reader.first_seq
    # Sequence numbers begin at 1, so this log is complete.
    if first_seq == 1:
        return 0
    _, rows = next(reader.frames(first_seq, first_seq + 1))
    return int(rows.column("store_ms")[0].as_py())
