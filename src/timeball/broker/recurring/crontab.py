"""Reads the entries of a crontab file as rules of schedules.

A line is a comment, an assignment such as `MAILTO=root`, or an entry. An entry has five fields or a name such as
`@daily`, in a system's crontab the user, and the command. The entries of a crontab have no names and no zone. So their
names are built from the commands, and the caller passes the zone. A line `CRON_TZ=Europe/Berlin` sets the zone of the
entries below it, as in cronie.

A name is the program and a hash of the whole command, such as `backup-5d41a2`. So an entry keeps its name when another
entry is added, removed or moved, and when its time changes. Entries with equal commands are numbered.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from timeball.broker.recurring.rule import Rule
from timeball.model.errors import InvalidDelay

_ASSIGNMENT = re.compile(r"""["']?([A-Za-z_]\w*)["']?\s*=\s*(.*)""")
_PROGRAM = re.compile(r"[\w.+/-]*\w")
# A path that a command tests or runs: not a device, and not a file that tells whether systemd runs.
_PATH = re.compile(r"(?<![\w/])/(?!dev/|run/)(?:[\w.+-]+/)*[\w.+-]+")
_SHELL_WORDS = {"cd", "command", "exec", "if", "nice", "test", "then"}
_NAME_CHARACTERS_MAX = 40
_HASH_DIGITS = 6


class CrontabEntry(NamedTuple):
    """An entry of a crontab file."""

    name: str  # unique in the file
    spec: dict[str, object] | None  # the canonical form of its rule, None if the rule is refused
    command: str
    note: str  # why the rule is refused, or a difference from cron
    user: str = ""  # in a system's crontab: who runs the command


def read_crontab(text: str, zone: str, *, has_user: bool = False) -> list[CrontabEntry]:
    """Read the entries of a crontab file.

    `zone`: the IANA name of the time zone of the machine that runs it. `has_user`: a user stands before each command,
    as in /etc/crontab and the files in /etc/cron.d. Raises InvalidDelay for an unknown `zone`. An invalid entry is
    returned with a note.
    """
    # An unknown zone is refused once, and not for each entry.
    Rule.parse({"cron": "@daily", "zone": zone})
    entries: list[CrontabEntry] = []
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if assignment := _ASSIGNMENT.fullmatch(line):
            if assignment[1] == "CRON_TZ":
                zone = assignment[2].strip("\"' ")
            continue
        entry = _read_entry(number, line, zone, has_user)
        name = _make_unique(entry.name, names)
        names.add(name)
        entries.append(entry._replace(name=name))
    return entries


def _read_entry(number: int, line: str, zone: str, has_user: bool) -> CrontabEntry:
    """Read an entry. `number`: of the line, from 1.

    If its rule is refused, `spec` is None and the note has the reason.
    """
    fields = 1 if line.startswith("@") else 5
    words = line.split(None, fields + has_user)
    if len(words) <= fields + has_user:
        return CrontabEntry(f"line-{number}", None, "", f"line {number}: {_entry_advice(has_user)}")
    command, input_text = _split_input(words[-1])
    user = words[fields] if has_user else ""
    note = "cron passes the text after % to the command as its input" if input_text is not None else ""
    try:
        spec = Rule.parse({"cron": " ".join(words[:fields]), "zone": zone}).spec()
    except InvalidDelay as error:
        return CrontabEntry(_build_name(command, number), None, command, f"line {number}: {error}", user)
    return CrontabEntry(_build_name(command, number), spec, command, note, user)


def _entry_advice(has_user: bool) -> str:
    """Describe an entry, for the note of a line that is none."""
    user = "the user, " if has_user else ""
    return f"an entry has five fields or a name such as @daily, {user}and a command"


def _split_input(command: str) -> tuple[str, str | None]:
    r"""Split a command at its first % without a backslash into the command and its input. `\%` stands for %.

    The input is None if there is no such %.
    """
    parts = re.split(r"(?<!\\)%", command, maxsplit=1)
    return parts[0].replace(r"\%", "%").strip(), parts[1] if len(parts) > 1 else None


def _build_name(command: str, number: int) -> str:
    """Build a name from the program in a command and a hash of the command. `line-<number>` if there is no program."""
    words = command.split() or [""]
    program = words[0]
    if program in _SHELL_WORDS or not _PROGRAM.fullmatch(program):
        path = _PATH.search(command)
        programs = (
            word for word in words if _PROGRAM.fullmatch(word) and word[0] != "-" and word not in _SHELL_WORDS
        )
        program = path[0] if path else next(programs, "")
    program = program.rpartition("/")[2]
    program = re.sub(r"[^A-Za-z0-9_-]+", "-", program).strip("-")[:_NAME_CHARACTERS_MAX]
    digits = hashlib.sha256(command.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{program}-{digits}" if program else f"line-{number}"


def _make_unique(name: str, names: set[str]) -> str:
    """Add a number, from 2 on, to a name that is already in `names`."""
    number, unique_name = 1, name
    while unique_name in names:
        number += 1
        unique_name = f"{name}-{number}"
    return unique_name
