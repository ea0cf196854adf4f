"""The marker files of a data folder: FORMAT with the product and format version, and RESTORING during a restore."""

from __future__ import annotations

import msgspec

from timeball.io.files import Files, RealFiles
from timeball.log.format import FORMAT_VERSION
from timeball.log.segment import contains_log
from timeball.model.errors import SetupError

FORMAT_NAME = "FORMAT"
# The checksum of the restored backup's manifest. Exists until the restore is finished, and no broker starts meanwhile.
RESTORING = "RESTORING"


class FormatFacts(msgspec.Struct):
    """The content of the file FORMAT in a data folder."""

    product: str
    format: int


def check_folder(files: RealFiles) -> None:
    """Raise SetupError if the folder belongs to another program or a newer Timeball, or if a restore is unfinished."""
    root = files.root
    if root.exists() and not root.is_dir():
        raise SetupError(f"--data {root} is a file; name a folder")
    if files.exists(RESTORING):
        raise SetupError(f"--data {root}: a restore was not finished; run `timeball restore` again")
    if not files.exists(FORMAT_NAME):
        other_files = [name for name in files.list_dir(".") if name != "LOCK"]
        if other_files and not contains_log(files):
            raise SetupError(
                f"--data {root} holds {other_files[0]!r} but no Timeball data: name an empty or new folder"
            )
        return
    try:
        facts = msgspec.json.decode(bytes(files.map_readonly(FORMAT_NAME)), type=FormatFacts)
    except msgspec.DecodeError as error:
        raise SetupError(f"--data {root}: its file FORMAT is not Timeball's; name another folder") from error
    if facts.product != "timeball":
        raise SetupError(f"--data {root} belongs to {facts.product!r}, not to Timeball; name another folder")
    if facts.format > FORMAT_VERSION:
        raise SetupError(
            f"--data {root} has format {facts.format}, written by a newer Timeball; "
            f"this one reads up to {FORMAT_VERSION}"
        )


def write_format(files: Files) -> None:
    """Write the file FORMAT into a new folder. An existing file stays unchanged."""
    if not files.exists(FORMAT_NAME):
        files.replace(FORMAT_NAME, msgspec.json.encode(FormatFacts("timeball", FORMAT_VERSION)))
