"""`timeball backup` and `timeball restore`: make a consistent copy of a data folder, and restore it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from timeball.cli.options import JsonOption
from timeball.cli.output import progress_bar, show
from timeball.cli.units import show_bytes, show_instant
from timeball.model.errors import SetupError

if TYPE_CHECKING:
    from timeball.node.backup import Manifest

DataOption = Annotated[
    Path, typer.Option("--data", envvar="TIMEBALL_DATA", metavar="DIR", help="The data folder.")
]
DATA = Path("timeball-data")


def backup(
    target: Annotated[Path, typer.Argument(metavar="TO", help="An empty or new folder.")],
    data: DataOption = DATA,
    as_json: JsonOption = False,
) -> None:
    """Copy a data folder, even one in use by a broker, consistent up to one row of the log.

    The backup contains every message that was acknowledged before the command
    began. If the command is interrupted, run it again to continue. The backup
    contains all data of the log, including the secrets of receipts.

    \b
    Examples:
      timeball backup /backups/monday
      timeball backup /backups/monday --data /var/lib/timeball --json | jq .row
    """
    from timeball.io.clock import SystemClock
    from timeball.io.files import RealFiles
    from timeball.node import backup

    if not data.is_dir():
        raise SetupError(f"--data {data}: there is no such folder")
    if target.resolve().is_relative_to(data.resolve()):
        raise SetupError(f"{target} lies in the data folder: name a folder elsewhere")
    with _progress("copying", as_json) as report_progress:
        manifest = backup.backup(RealFiles(data), RealFiles(target), SystemClock(), report_progress)
    _report(manifest, f"backup of {data} in {target}", as_json=as_json)


def restore(
    source: Annotated[Path, typer.Argument(metavar="FROM", help="The folder of a backup.")],
    data: DataOption = DATA,
    as_json: JsonOption = False,
) -> None:
    """Copy a backup into an empty data folder, and check every byte of it.

    If the command is interrupted, run it again to continue. No broker starts on
    the folder until the restore is finished.

    \b
    Examples:
      timeball restore /backups/monday
      timeball restore /backups/monday --data /var/lib/timeball-2 --json
    """
    from timeball.io.files import RealFiles
    from timeball.node import backup

    if not source.is_dir():
        raise SetupError(f"{source}: there is no such folder")
    with _progress("restoring", as_json) as report_progress:
        manifest = backup.restore(RealFiles(source), RealFiles(data), report_progress)
    _report(manifest, f"{source} restored into {data}", as_json=as_json)


@contextmanager
def _progress(activity: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, and yield a function that sets the completed bytes and the total."""
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task(activity, total=None)
        yield lambda completed, total: progress.update(task, completed=completed, total=total)


def _report(manifest: Manifest, subject: str, *, as_json: bool) -> None:
    size_bytes, count = manifest.used_bytes, len(manifest.files)
    document = {
        "row": manifest.row, "first_row": manifest.first_row, "made_ms": manifest.made_ms,
        "files": count, "bytes": size_bytes,
    }  # fmt: skip
    line = (
        f"{subject}: rows {manifest.first_row:,} to {manifest.row - 1:,} as of {show_instant(manifest.made_ms)}, "
        f"{count:,} files, {show_bytes(size_bytes)}"
    )
    show(document, [line], as_json=as_json)
