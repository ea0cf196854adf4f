"""`timeball status`: one look at a running broker."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from timeball.cli.options import DEFAULT_ENDPOINT, EndpointOption, JsonOption, connect
from timeball.cli.output import out, print_json
from timeball.cli.units import show_bytes


def status(endpoint: EndpointOption = DEFAULT_ENDPOINT, as_json: JsonOption = False) -> None:
    """Show what a broker holds, how punctual it is and what it costs.

    \b
    Examples:
      timeball status
      timeball status --json | jq .schedule
      timeball status --endpoint grpc://broker-2:7400
    """
    with connect(endpoint) as ball:
        found: dict[str, Any] = ball.status()
    if as_json:
        print_json(found)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in _rows(endpoint, found):
        table.add_row(label, text)
    out.print(table)


def _rows(endpoint: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    log, waiting = found["log"], found["schedule"]
    strategy, stored = found["strategy"], waiting["table_rows"]
    near = waiting["near_rows"]
    # With another schedule the log is the tail, and the schedule's own files say what of it waits.
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
        ("waiting", f"{kept}, {stored:,} in the pending table, {near:,} near their instant"),
        *(levels if for_levels else []),
        ("of them cancelled", f"{waiting['cancelled_rows']:,}"),
        ("pending table", f"version {found['table']['version']}, {waiting['table_files']:,} files"),
        ("released", _punctuality(found["lateness"])),
        *([("codec", found["codec"])] if found.get("codec") else []),
        (
            "memory",
            f"{show_bytes(found['anon_bytes'])} held, {show_bytes(found['rss_bytes'])} with mapped files",
        ),
    ]


def _room(disk: dict[str, Any]) -> str:
    """Return the free disk space, and that sends are refused when that is too little."""
    refused = f": NEW MESSAGES ARE REFUSED, {disk['no_room']}" if disk["no_room"] else ""
    return f"{show_bytes(disk['free_bytes'])} free{refused}"


def _punctuality(lateness: dict[str, Any]) -> str:
    """How many were released since the start, and within which bound 99 % of them were."""
    released = lateness["released"]
    if not released:
        return "nothing since the broker started"
    counted = 0
    for bound, count in lateness["buckets"].items():
        counted += count
        if counted >= 0.99 * released:
            punctual = f"99 % of them late by {bound}, the latest {lateness['max_ms']} ms"
            return f"{released:,} since the broker started, {punctual}"
    raise AssertionError("the buckets hold all that was released")
