"""`timeball status`: show the state of a running broker."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, as_parameter, connect
from timeball.cli.output import out, print_json
from timeball.cli.units import parse_duration_ms, show_bytes

GROUPS_SHOWN_MAX = 5  # named in the warning about different subscriptions


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again until Ctrl-C.")] = False,
    every_ms: Annotated[
        int,
        typer.Option(
            "--every", parser=as_parameter(parse_duration_ms), metavar="DURATION", help="How often to look."
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
      timeball status --endpoint grpc://broker-2:7400
    """
    with connect(endpoint) as ball:
        if not watch:
            _print(endpoint, ball.status(), as_json=as_json)
            return
        try:
            with Live(console=out(), auto_refresh=False, screen=out().is_terminal and not as_json) as live:
                while True:
                    found = ball.status()
                    if as_json:
                        print_json(found)
                    else:
                        live.update(_table(endpoint, found), refresh=True)
                    time.sleep(every_ms / 1000)
        except KeyboardInterrupt:
            pass


def _print(endpoint: str, found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        out().print(_table(endpoint, found))


def _table(endpoint: str, found: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in _rows(endpoint, found):
        table.add_row(label, text)
    return table


def _rows(endpoint: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    log, waiting = found["log"], found["schedule"]
    strategy, stored = found["strategy"], waiting["table_rows"]
    near = waiting["near_rows"]
    # With another strategy, no message moves to the table: the whole log is the tail, and the strategy's own files
    # count the pending messages in it.
    kept = f"{waiting['tail_rows']:,} in the log's tail"
    if strategy != "hour_log":
        kept = f"{waiting['waiting_rows']:,} in the log"
    for_levels = found["levels"]["waiting_rows"]
    levels = [("for delay levels", f"{for_levels:,}")]
    return [
        ("broker", f"timeball {found['version']} at {endpoint}, pid {found['pid']}"),
        ("log", f"{log['next_seq'] - log['first_seq']:,} rows, {show_bytes(log['bytes'])}"),
        ("on disk up to", f"row {log['durable_seq']:,}"),
        ("disk", _room(found["disk"])),
        ("schedule", strategy),
        ("waiting", f"{found['waiting_messages']:,}"),
        *(levels if for_levels else []),
        ("redeliveries", f"{found['redelivery_messages']:,}"),
        ("kept", f"{kept}, {stored:,} in the pending table, {near:,} near their instant"),
        ("pending table", f"version {found['table']['version']}, {waiting['table_files']:,} files"),
        *_strangers(found["table"]),
        *_store(found["table"]),
        *_replica(found.get("replica")),
        ("released", _punctuality(found["lateness"])),
        *_conflicts(found.get("conflicting_groups", [])),
        *([("codec", found["codec"])] if found.get("codec") else []),
        ("time zones", f"tzdata {found['tzdata']}"),
        (
            "memory",
            f"{show_bytes(found['anon_bytes'])} held, {show_bytes(found['rss_bytes'])} with mapped files",
        ),
    ]


def _strangers(table: dict[str, Any]) -> list[tuple[str, str]]:
    """Build the lines about changes of the table by other programs."""
    found = []
    if commits := table.get("foreign_commits"):
        found.append(
            ("changed by others", f"{commits:,} times, last {table['last_foreign_commit']}; corrected")
        )
    if lost := table.get("lost_files"):
        rows = f"{table['lost_rows']:,} messages wait for them"
        found.append(("lost", f"{lost:,} DATA FILES ARE GONE, {rows}: put them back from a copy"))
    return found


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


def _replica(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Build the line about a node of a cluster."""
    if found is None:
        return []
    lags = {name: max(0, found["log_seq"] - peer["acked_seq"]) for name, peer in found["peers"].items()}
    behind = ", ".join(f"{name} {rows:,} rows behind" for name, rows in sorted(lags.items()))
    return [
        ("group", f"{found['group']}, {found['role']} in epoch {found['epoch']}; {behind or 'no replica'}")
    ]


def _room(disk: dict[str, Any]) -> str:
    """Format the free disk space, and state that sends are refused if it is too small."""
    refused = f": NEW MESSAGES ARE REFUSED, {disk['no_room']}" if disk["no_room"] else ""
    return f"{show_bytes(disk['free_bytes'])} free{refused}"


def _punctuality(lateness: dict[str, Any]) -> str:
    """Format the number of releases since the start, and the lateness that 99 % of them did not exceed."""
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
    raise AssertionError("the buckets hold all that was released")
