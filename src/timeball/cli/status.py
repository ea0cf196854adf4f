"""The contents and the state of a running broker.

timeball status          contents, punctuality, and use of disk and memory
timeball topics          all topics, or the queues of one topic
timeball groups          how far consumer groups are behind
timeball dead-letters    list, resend and delete the messages that a consumer group has given up
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.table import Table

from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    as_parameter,
    connect,
    parse_duration_ms,
    show_bytes,
    show_instant,
)
from timeball.cli.output import (
    ExitCode,
    body_fields,
    decode_text,
    out,
    print_json,
    print_line,
    print_note,
    show,
)
from timeball.model.errors import RequestError

if TYPE_CHECKING:
    from timeball.model.answers import DeadLetterRow, GroupState, Resolved


# ---- timeball status ------------------------------------------------------------------------------------------


GROUPS_SHOWN_MAX = 5  # named in the warning about different subscriptions


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    every_ms: Annotated[
        int,
        typer.Option(
            "--every",
            parser=as_parameter(parse_duration_ms),
            metavar="DURATION",
            help="Interval between refreshes.",
        ),
    ] = "2s",  # type: ignore[assignment]  # Typer parses a default like a given value
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of a broker, its punctuality, and its use of disk and memory.

    \b
    Examples:
      timeball status
      timeball status --watch
      timeball status --watch --every 10s --json | jq .lateness
      timeball status --json | jq .schedule
      timeball status --endpoint http://broker-2:7480
    """
    with connect(endpoint) as client:
        if not watch:
            _print_status(endpoint, client.status(), as_json=as_json)
            return
        try:
            with Live(console=out(), auto_refresh=False, screen=out().is_terminal and not as_json) as live:
                while True:
                    state = client.status()
                    if as_json:
                        print_json(state)
                    else:
                        live.update(_status_table(endpoint, state), refresh=True)
                    time.sleep(every_ms / 1000)
        except KeyboardInterrupt:
            pass


def _print_status(endpoint: str, state: dict[str, Any], *, as_json: bool) -> None:
    """Print the status of a broker as a JSON document or as a table."""
    if as_json:
        print_json(state)
    else:
        out().print(_status_table(endpoint, state))


def _status_table(endpoint: str, state: dict[str, Any]) -> Table:
    """Build the table that `timeball status` shows people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in _labelled_lines(endpoint, state):
        table.add_row(label, text)
    return table


def _labelled_lines(endpoint: str, state: dict[str, Any]) -> list[tuple[str, str]]:
    """Build the lines of `timeball status` for people: label and text. `state`: a broker's status as it answers."""
    log, schedule = state["log"], state["schedule"]
    strategy, table_rows = state["strategy"], schedule["table_rows"]
    near_rows = schedule["near_rows"]
    # With another strategy, no message moves to the table: the whole log is the tail, and the strategy's own files
    # count the pending messages in it.
    log_part = f"{schedule['tail_rows']:,} in the log's tail"
    if strategy != "hour_log":
        log_part = f"{schedule['waiting_rows']:,} in the log"
    level_rows = state["levels"]["waiting_rows"]
    level_line = [("for delay levels", f"{level_rows:,}")]
    return [
        ("broker", f"timeball {state['version']} at {endpoint}, pid {state['pid']}"),
        ("log", f"{log['next_seq'] - log['first_seq']:,} rows, {show_bytes(log['bytes'])}"),
        ("on disk up to", f"row {log['durable_seq']:,}"),
        ("disk", _disk_text(state["disk"])),
        ("schedule", strategy),
        ("waiting", f"{state['waiting_messages']:,}"),
        *(level_line if level_rows else []),
        ("redeliveries", f"{state['redelivery_messages']:,}"),
        ("kept", f"{log_part}, {table_rows:,} in the pending table, {near_rows:,} near their instant"),
        ("pending table", f"version {state['table']['version']}, {schedule['table_files']:,} files"),
        *_foreign_changes(state["table"]),
        *_store(state["table"]),
        *_replica(state.get("replica")),
        ("released", _punctuality(state["lateness"])),
        *_conflicts(state.get("conflicting_groups", [])),
        *([("codec", state["codec"])] if state.get("codec") else []),
        ("time zones", f"tzdata {state['tzdata']}"),
        *(
            [("clock", "manual: it stands still until a client advances it")]
            if state.get("clock") == "manual"
            else []
        ),
        (
            "memory",
            f"{show_bytes(state['anon_bytes'])} held, {show_bytes(state['rss_bytes'])} with mapped files",
        ),
    ]


def _foreign_changes(table: dict[str, Any]) -> list[tuple[str, str]]:
    """Build the lines about changes of the table by other programs."""
    lines = []
    if commits := table.get("foreign_commits"):
        lines.append(
            ("changed by others", f"{commits:,} times, last {table['last_foreign_commit']}; corrected")
        )
    if lost := table.get("lost_files"):
        pending = f"{table['lost_rows']:,} messages wait for them"
        lines.append(("lost", f"{lost:,} DATA FILES ARE GONE, {pending}: put them back from a copy"))
    return lines


def _store(table: dict[str, Any]) -> list[tuple[str, str]]:
    """Build the line about the table's object store, if the table is in one."""
    if "://" not in table.get("uri", ""):
        return []
    missing = f", {table['missing_files']:,} FILES DUE SOON ARE MISSING" if table["missing_files"] else ""
    problem = f"; DOES NOT ANSWER: {table['problem']}" if table["problem"] else ""
    return [("object store", f"{table['uri']}, {show_bytes(table['cached_bytes'])} here{missing}{problem}")]


def _conflicts(groups: list[str]) -> list[tuple[str, str]]:
    """Build the line about groups whose members have different subscriptions."""
    if not groups:
        return []
    more = f" and {len(groups) - GROUPS_SHOWN_MAX:,} more" if len(groups) > GROUPS_SHOWN_MAX else ""
    names = ", ".join(groups[:GROUPS_SHOWN_MAX])
    return [
        (
            "WARNING",
            f"members of {names}{more} have different subscriptions and lose messages: timeball groups",
        )
    ]


def _replica(replica: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Build the line about a node of a cluster."""
    if replica is None:
        return []
    lags = {name: max(0, replica["log_seq"] - peer["acked_seq"]) for name, peer in replica["peers"].items()}
    behind = ", ".join(f"{name} {rows:,} rows behind" for name, rows in sorted(lags.items()))
    return [
        (
            "group",
            f"{replica['group']}, {replica['role']} in epoch {replica['epoch']}; {behind or 'no replica'}",
        )
    ]


def _disk_text(disk: dict[str, Any]) -> str:
    """Format the free disk space, with a warning if the broker refuses messages because it is too small."""
    refused = f": NEW MESSAGES ARE REFUSED, {disk['no_room']}" if disk["no_room"] else ""
    return f"{show_bytes(disk['free_bytes'])} free{refused}"


def _punctuality(lateness: dict[str, Any]) -> str:
    """Format the number of releases since the broker started, and their 99th percentile of lateness."""
    released = lateness["released"]
    if not released:
        return "nothing since the broker started"
    counted = 0
    for bound, count in lateness["buckets"].items():
        counted += count
        if counted >= 0.99 * released:
            latest_ms = lateness["max_ms"]
            # A bucket's bound may be far above all values in the bucket.
            if bound.startswith("<=") and int(bound[2:].removesuffix("ms")) > latest_ms:
                bound = f"<={latest_ms}ms"
            punctual = f"99 % of them late by {bound}, the latest {latest_ms} ms"
            return f"{released:,} since the broker started, {punctual}"
    raise AssertionError("the buckets contain all releases")


# ---- timeball topics ------------------------------------------------------------------------------------------


def topics(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", help="Only this topic, queue by queue.")
    ] = None,
    max_per_second: Annotated[
        int | None,
        typer.Option(
            "--max-per-second",
            metavar="N",
            min=0,
            help="First let at most N messages of TOPIC become visible in a second. 0: no limit.",
        ),
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the topics, with their queues and their stored visible messages.

    Pending messages are not counted here: `timeball pending` and `timeball
    forecast` count them.

    \b
    Examples:
      timeball topics
      timeball topics orders
      timeball topics orders --max-per-second 50
      timeball topics --json | jq -r .topic
    """
    if max_per_second is not None and topic is None:
        raise RequestError("--max-per-second concerns one topic: name it")
    with connect(endpoint) as client:
        if topic is not None and max_per_second is not None:
            client.create_topic(topic, None, max_per_second=max_per_second)
        if topic is not None:
            queues: list[dict[str, object]] = [
                {"topic": topic, "queue": queue_id, "min": range_.min, "max": range_.max}
                for queue_id, range_ in sorted(client.queues(topic).items())
            ]
            _print_topics(queues, ["queue", "min", "max"], as_json=as_json)
            if max_per_second is not None and not as_json:
                limit = f"at most {max_per_second}" if max_per_second else "any number of"
                print_note(f"topic {topic}: {limit} messages a second")
            return
        rows: list[dict[str, object]] = []
        for name, count in sorted(client.topics().items()):
            messages = sum(range_.max - range_.min for range_ in client.queues(name).values())
            rows.append({"topic": name, "queues": count, "messages": messages})
    _print_topics(rows, ["topic", "queues", "messages"], as_json=as_json)
    if not rows and not as_json:
        print_note("there are no topics yet: a topic is created by its first message")


def _print_topics(rows: list[dict[str, object]], columns: list[str], *, as_json: bool) -> None:
    """Print rows as a table with these columns, or each row as a JSON document. Without rows, print nothing."""
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "topic" else "right")
    for row in rows:
        values = (row[name] for name in columns)
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in values))
    if rows:
        out().print(table)


# ---- timeball groups ------------------------------------------------------------------------------------------


COLUMNS = ("group", "topic", "lag", "in flight", "expired", "dead letters", "attempts")


def groups(
    group: Annotated[
        str | None, typer.Argument(metavar="[GROUP]", help="Only this group, topic by topic.")
    ] = None,
    max_per_key: Annotated[
        int | None,
        typer.Option(
            "--max-per-key",
            metavar="N",
            min=0,
            help="First let members of GROUP hold at most N messages with the same key. 0: no limit.",
        ),
    ] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the consumer groups: how many messages each is behind, messages in flight, and dead letters.

    A message is in flight while a member of the group holds it. "expired"
    counts the messages that retention, or the deletion of a topic, removed
    before the group read them.

    \b
    Examples:
      timeball groups
      timeball groups billing
      timeball groups billing --max-per-key 1
      timeball groups --json | jq -r 'select(.dead_letters > 0).group'
    """
    if max_per_key is not None and group is None:
        raise RequestError("--max-per-key concerns one group: name it")
    with connect(endpoint) as client:
        if group is not None and max_per_key is not None:
            client.limit_group(group, max_per_key=max_per_key)
        states = client.groups(group)
    if as_json:
        for state in states:
            print_json(state)
        return
    if not states:
        print_note("there are no groups yet: a group is created by its first member")
        return
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("group", "topic") else "right")
    for state in states:
        _add_group_rows(table, state, by_topic=group is not None)
    out().print(table)
    for state in states:
        if state.max_per_key is not None:
            print_note(
                f"group {state.group}: its members hold at most {state.max_per_key} of the messages with one key"
            )
        for conflict in state.conflicts:
            subject = f"topic {conflict.topic}" if conflict.topic else "topics"
            print_note(
                f"group {state.group}: members want different {subject}: {'; '.join(conflict.wanted)}. "
                "Each loses messages: give all members of a group the same subscriptions"
            )


def _add_group_rows(table: Table, state: GroupState, *, by_topic: bool) -> None:
    """Add the row of a consumer group, and with `by_topic` one for each of several topics below it."""
    topics = ", ".join(progress.topic for progress in state.topics)
    dead_letters = f"{state.dead_letters:,}"
    if state.expired_dead_letters:
        dead_letters += f" ({state.expired_dead_letters:,} expired)"
    counts = (
        f"{state.lag:,}",
        f"{state.in_flight:,}",
        f"{state.expired:,}",
        dead_letters,
        f"{state.attempts_max:,}",
    )
    table.add_row(state.group, "all" if by_topic and len(state.topics) > 1 else topics, *counts)
    if by_topic and len(state.topics) > 1:
        for progress in state.topics:
            table.add_row(
                "",
                progress.topic,
                f"{progress.lag:,}",
                f"{progress.in_flight:,}",
                f"{progress.expired:,}",
                "",
                "",
            )


# ---- timeball dead-letters ------------------------------------------------------------------------------------


dead_letters_app = typer.Typer(
    help="List, resend and delete the messages that a group has given up.", no_args_is_help=True
)

PAGE_ROWS = 100
BODY_SHOWN = 60  # characters in the output for people (--json prints all that the broker returns)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The consumer group.")]
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[DEAD_LETTER]...", help="Names of dead letters, as `list` prints them."),
]
AllOption = Annotated[bool, typer.Option("--all", help="All remaining dead letters.")]


@dead_letters_app.callback()
def _dead_letters() -> None:
    pass


@dead_letters_app.command("list")
def list_(
    group: GroupArgument,
    max_messages: Annotated[int, typer.Option("--max", min=1, help="At most this many.")] = PAGE_ROWS,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """List the remaining dead letters of a group, the oldest first in each queue.

    \b
    Examples:
      timeball dead-letters list billing
      timeball dead-letters list billing --max 1000 --json | jq -r 'select(.topic == "orders").dead_letter'
    """
    remaining, after, count = max_messages, None, 0
    with connect(endpoint) as client:
        while remaining:
            page = client.dead_letters(group, max_messages=min(remaining, PAGE_ROWS), after=after)
            for row in page.dead_letters:
                _print_dead_letter(row, as_json=as_json)
            count += len(page.dead_letters)
            remaining, after = remaining - len(page.dead_letters), page.next_page
            if after is None:
                break
    if not as_json:
        print_note(f"{count:,} dead letters" + (", there are more" if after is not None else ""))


@dead_letters_app.command()
def resend(
    group: GroupArgument,
    names: NamesArgument = None,
    all_left: AllOption = False,
    after: Annotated[
        str | None, typer.Option("--after", metavar="DURATION", help="Deliver the first one after this time.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="NUMBER", help="Deliver this many in a second.")
    ] = None,
    where: Annotated[
        str,
        typer.Option("--where", metavar="SQL", help="With --all: only those that meet this SQL condition."),
    ] = "",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters to their group again, with all attempts ahead.

    Exit code 1: a dead letter that you named does not exist any more.

    \b
    Examples:
      timeball dead-letters resend billing --all
      timeball dead-letters resend billing --all --after 10m --rate 20
      timeball dead-letters resend billing --all --where "topic = 'orders' AND attempts > 3"
      timeball dead-letters list billing --json | jq -r .dead_letter | xargs timeball dead-letters resend billing
    """
    selected = _select_names(names, all_left=all_left)
    with connect(endpoint) as client:
        resolved = client.resend_dead_letters(group, selected, after=after, rate=rate, where=where)
        _report(resolved, "sent again", as_json=as_json)


@dead_letters_app.command()
def delete(
    group: GroupArgument,
    names: NamesArgument = None,
    all_left: AllOption = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Delete dead letters for good.

    Exit code 1: a dead letter that you named does not exist any more.

    \b
    Examples:
      timeball dead-letters delete billing --all
      timeball dead-letters delete billing 0-17 --json
    """
    selected = _select_names(names, all_left=all_left)
    with connect(endpoint) as client:
        _report(client.delete_dead_letters(group, selected), "deleted", as_json=as_json)


def _select_names(names: list[str] | None, *, all_left: bool) -> list[str] | None:
    """Check that either names or --all is given, and return the names, or None for all. Raises RequestError."""
    if bool(names) == all_left:
        raise RequestError(
            "give either names of dead letters, as `timeball dead-letters list` prints them, or --all"
        )
    return names or None


def _report(resolved: Resolved, outcome: str, *, as_json: bool) -> None:
    """Print how many dead letters were resolved, and how many were not found. Exits with code 1 if any was not found.

    `outcome`: the word for a resolution, such as "deleted".
    """
    missing = resolved.found.count(False)
    lines = [f"{resolved.rows:,} {outcome}"] + ([f"{missing:,} not there any more"] if missing else [])
    show(resolved, lines, as_json=as_json)
    if missing:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _print_dead_letter(row: DeadLetterRow, *, as_json: bool) -> None:
    """Print a dead letter: one JSON document, or a line with the first BODY_SHOWN characters of its body."""
    if as_json:
        fields = msgspec.structs.asdict(row)
        del fields["body"]
        print_json(fields | body_fields(row.body))
        return
    text = decode_text(row.body)
    readable = text if text is not None else repr(row.body)
    excerpt = readable if len(readable) <= BODY_SHOWN else f"{readable[:BODY_SHOWN]}…"
    print_line(
        f"{row.dead_letter}  {show_instant(row.died_ms)}  {row.topic}  {row.attempts} attempts  {row.id}  {excerpt!r}"
    )
