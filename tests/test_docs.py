"""The documentation is checked like code: every setting, command, error, path and file has its
entry, examples work, and links lead somewhere. Each check has a control.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.docs_pages import DOCS, PAGES, ROOT, first_cells, page, section
from tests.node_fixture import running_node

import timeball.client.attempts as client_attempts
from timeball import __version__
from timeball.cli import main, output
from timeball.edges.flight import codec
from timeball.edges.shared.arrow_ipc import SEND_SCHEMA
from timeball.log import checkpoint, queue_index, recovery
from timeball.log import format as fmt
from timeball.model import config, errors, wire
from timeball.model.key_hash import KeyRun
from timeball.model.message import LOG_SCHEMA, TABLE_SCHEMA, Kind
from timeball.schedule import level_cascade, timer_wheel
from timeball.schedule.level_cascade import CascadeState
from timeball.schedule.timer_wheel import WheelState
from timeball.table import identities
from timeball.table.attachment import Attachment, FileEntry


def absent(names: Iterable[str], documented: set[str] | str) -> list[str]:
    """Return the names that are not documented."""
    return sorted(name for name in names if name not in documented)


# ---- everything is documented ----------------------------------------------------------------------------


def settings() -> list[dataclasses.Field[object]]:
    """Return the fields of the settings."""
    return list(dataclasses.fields(config.Settings))


def test_every_setting_is_documented() -> None:
    options = ["--" + field.name.replace("_", "-") for field in settings()]
    cells = first_cells(section(page("docs/operations.md"), "Settings"))
    assert not absent(options, cells)
    assert not [name for name in cells if re.match(r"--\w", name) and name not in options], "no such setting"


def commands() -> set[str]:
    """Return every command as it is typed, such as `timeball pipeline run`."""
    typed: set[str] = set()

    def walk(command: Any, path: str) -> None:
        """Add the commands below a command."""
        names = list(getattr(command, "commands", ()))
        if not names:
            typed.add(path)
        for name in names:
            walk(command.get_command(None, name), f"{path} {name}")

    walk(typer.main.get_command(main.app), "timeball")
    return typed


def test_every_command_is_documented() -> None:
    table = section(page("docs/operations.md"), "Commands")
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    rows = {f"timeball {name}" for cell in first for name in re.findall(r"`([^`]+)`", cell)}
    assert not absent(commands(), rows)
    assert not absent(rows, commands()), "no such command"


def test_every_exit_code_is_documented() -> None:
    cells = first_cells(section(page("docs/operations.md"), "Exit codes"))
    assert not absent([str(int(code)) for code in output.ExitCode], cells)


def error_classes() -> dict[str, str]:
    """Return the code of each error class by its name, also of the client's errors."""
    modules = (errors, client_attempts)
    return {
        name: kind.code
        for module in modules
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, errors.TimeballError)
    }


def test_every_error_class_is_documented_with_its_code() -> None:
    codes = error_classes()
    rows = dict(
        re.findall(r"^\| (\w+) \| `(\w+)` \| \S", section(page("docs/operations.md"), "Errors"), re.MULTILINE)
    )
    assert rows == codes


def test_every_error_code_of_the_broker_is_documented_for_flight() -> None:
    on_the_wire = {
        kind.code
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.TimeballError)
    }
    assert first_cells(section(page("docs/flight.md"), "Errors")) >= on_the_wire


def test_every_flight_verb_is_documented() -> None:
    text = page("docs/flight.md")
    reads = {ticket.__struct_config__.tag for ticket in wire.Ticket.__args__}
    for verb in ["send", *codec.ACTIONS, *reads]:
        assert section(text, verb), f"docs/flight.md has no heading for {verb}"
    listed = re.findall(r"^### (\w+)$", section(text, "Actions"), re.MULTILINE)
    assert listed == list(codec.ACTIONS), "in the order of the code"


def test_every_argument_of_a_verb_is_documented() -> None:
    text = page("docs/flight.md")
    for verb, (body, _, _) in codec.ACTIONS.items():
        names = body.__struct_fields__ if body else ()
        assert not absent([f'"{name}"' for name in names], section(text, verb)), verb
    for ticket in wire.Ticket.__args__:
        verb = ticket.__struct_config__.tag
        assert not absent([f'"{name}"' for name in ticket.__struct_fields__], section(text, verb)), verb


def test_every_column_of_a_send_is_documented() -> None:
    assert first_cells(section(page("docs/flight.md"), "send")) >= set(SEND_SCHEMA.names)


def test_every_field_of_the_status_is_documented(tmp_path: Path) -> None:
    names: set[str] = set()
    for schedule in config.STRATEGIES:
        with running_node(tmp_path / schedule, strategy=schedule) as node:
            names |= {
                f"{name}.{inner}" if isinstance(value, dict) else name
                for name, value in node.node.status().items()
                for inner in (value if isinstance(value, dict) else [""])
            }
    cells = first_cells(section(page("docs/flight.md"), "status"))
    assert not absent(names, cells)
    assert not absent(cells - {"", "field", "---"}, names), "no such field"


@pytest.mark.parametrize("schedule", config.STRATEGIES)
def test_every_file_of_a_data_folder_is_documented(tmp_path: Path, schedule: str) -> None:

    with running_node(tmp_path / "data", strategy=schedule) as node, node.client() as ball:
        ball.send("orders", "now")
        ball.send("orders", "later", after="2d", keys="a")
        if schedule == "hour_log":
            ball.compact()
        ball.cancel(key="a")
        ball.pull("orders", "g")
        ball.browse("orders", "h")
        ball.commit("orders", "h")
    drawn = section(page("docs/operations.md"), "The data folder")
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            top = path.relative_to(tmp_path / "data").parts[0]
            assert re.search(rf"^{re.escape(top)}[\s/]", drawn, re.MULTILINE), path


@pytest.mark.parametrize(
    ("folder", "listing"),
    [
        ("docs/decisions", "docs/decisions.md"),
        ("docs/formats", "docs/contents.md"),
        ("docs/formats", "CHANGELOG.md"),
        ("docs/formats", "docs/operations.md"),
    ],
)
def test_every_page_of_a_folder_is_listed(folder: str, listing: str) -> None:
    pages = [path.name for path in (ROOT / folder).glob("*.md")]
    assert pages
    assert not absent([f"/{name})" for name in pages], page(listing)), listing
    assert absent(["/0000-no-page.md)"], page(listing)), "the control"


def test_every_port_that_is_open_by_default_is_documented() -> None:
    """The introduction for operators names all of them."""
    ports = [field.default for field in settings() if field.name == "port" or field.name.endswith("_port")]
    first = page("docs/operations.md").partition("\n## ")[0]
    assert not absent(map(str, ports), first)


FORMAT_FIELDS: list[tuple[str, str, Iterable[str]]] = [
    ("commit-log", "Rows", [*LOG_SCHEMA.names, *(kind.name for kind in Kind)]),
    ("pending-table", "Rows", TABLE_SCHEMA.names),
    ("pending-table", "Attach", Attachment.__struct_fields__),
    ("queue-index", "Queue index", fmt.ENTRY.names or ()),
    ("checkpoint", "Checkpoint", checkpoint.Facts.__struct_fields__),
    ("timer-wheel", "The ring", timer_wheel.RECORD.names or ()),
    (
        "timer-wheel",
        "Links and entries",
        (*(timer_wheel.LINK.names or ()), *(timer_wheel.ENTRY.names or ())),
    ),
    ("timer-wheel", "Entries of a cascade", level_cascade.RECORD.names or ()),
    ("timer-wheel", "State", (*WheelState.__struct_fields__, *CascadeState.__struct_fields__)),
]


@pytest.mark.parametrize(("name", "heading", "fields"), FORMAT_FIELDS)
def test_every_field_of_a_format_is_documented(name: str, heading: str, fields: Iterable[str]) -> None:
    text = section(page(f"docs/formats/{name}.md"), heading)
    cells = first_cells(text) | {
        word for line in text.splitlines() for word in line.replace("|", " ").split()
    }
    assert not absent(fields, cells)


def test_every_field_of_a_file_entry_is_documented() -> None:
    assert not absent(
        [f"`{name}`" for name in FileEntry.__struct_fields__], page("docs/formats/pending-table.md")
    )


DRAWN = [
    ("commit-log", fmt),
    ("queue-index", queue_index),
    ("checkpoint", checkpoint),
    ("key-run", inspect.getmodule(KeyRun)),
    ("pending-table", identities),
    ("frame-index", recovery),
    ("timer-wheel", timer_wheel),
    ("timer-wheel", level_cascade),
]


@pytest.mark.parametrize(("name", "module"), DRAWN, ids=[name for name, _ in DRAWN])
def test_the_bytes_are_drawn_as_in_the_code(name: str, module: object) -> None:
    text = page(f"docs/formats/{name}.md")
    docstring = inspect.getdoc(module) or ""
    boxes = [line.strip() for line in docstring.splitlines() if line.strip().startswith(("+-", "| "))]
    assert boxes
    missing = [box for box in boxes if box not in text and not box.startswith('| magic "TIMEBALL"')]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "name",
    [
        "commit-log",
        "pending-table",
        "queue-index",
        "checkpoint",
        "key-run",
        "frame-index",
        "timer-wheel",
    ],
)
def test_every_format_has_its_chapters(name: str) -> None:
    text = page(f"docs/formats/{name}.md")
    for heading in ("Limits", "Recovery", "Versions"):
        assert section(text, heading), heading


def test_the_commands_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", page("Makefile"), re.MULTILINE))
    for path in PAGES:
        text = path.read_text("utf-8")
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                words = line.split()
                if words and words[0] == "make":
                    assert words[1] in targets, f"{path.name}: {line}"
                if words and words[0] == ".venv/bin/timeball":
                    assert f"timeball {words[1]}" in commands() or words[1] == "pipeline", (
                        f"{path.name}: {line}"
                    )


def test_the_changelog_knows_this_version() -> None:
    assert f"\n## {__version__} " in page("CHANGELOG.md")


# ---- what is pointed to is there ---------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Return the headings of a page as a browser addresses them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Yield the links of a page to missing files and headings."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", bare):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: {target}"
        elif anchor and anchor not in anchors(text if file == path else file.read_text("utf-8")):
            yield f"{path.relative_to(ROOT)}: {target} (no such heading)"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert not list(broken_links(path, path.read_text("utf-8")))


def test_broken_links_are_noticed() -> None:
    text = "# A heading\n[a](nowhere.md) [b](README.md#figures) [c](README.md#elsewhere)\n```\n[e](f)\n```\n"
    assert [line.split(": ")[1] for line in broken_links(ROOT / "x.md", text)] == [
        "nowhere.md",
        "README.md#elsewhere (no such heading)",
    ]


def rows_without_a_header(text: str) -> Iterator[str]:
    """Yield the first row of each block of rows that is shown as text, because no header is above it."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^\|.*\n)+", bare, re.MULTILINE):
        rows = block.splitlines()
        if len(rows) < 2 or not re.fullmatch(r"[|\-: ]+", rows[1]):
            yield rows[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_table_has_a_header(path: Path) -> None:
    assert not list(rows_without_a_header(path.read_text("utf-8")))


def test_a_broken_table_is_noticed() -> None:
    whole = "| a | b |\n| --- | ---: |\n| 1 | 2 |\n"
    assert not list(rows_without_a_header(whole))
    assert list(rows_without_a_header(whole + "\n| 3 | 4 |\n")) == ["| 3 | 4 |"]


def named_paths(text: str) -> set[str]:
    """Return the paths in backquotes that begin with a folder of the repository."""
    return set(re.findall(r"`((?:tests|benchmarks|src|docs|requirements)/[\w./\-]*)`", text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_that_are_named_exist(path: Path) -> None:
    assert not [name for name in named_paths(path.read_text("utf-8")) if not (ROOT / name).exists()]


def test_named_paths_are_found() -> None:
    assert named_paths("see `tests/gone.py` and `src/timeball/log/` but not `log/format.py`") == {
        "tests/gone.py",
        "src/timeball/log/",
    }


def pages_named_in_code() -> Iterator[tuple[str, str]]:
    """Yield each module that names a page of the documentation, and this page."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in re.findall(r"docs/[\w./\-]*\w\.md", path.read_text("utf-8")):
            yield path.relative_to(ROOT).as_posix(), name


def test_pages_that_the_code_names_exist() -> None:
    named = list(pages_named_in_code())
    assert len(named) > 3
    assert not [f"{place}: {name}" for place, name in named if not (ROOT / name).exists()]


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    unread = [ROOT / "README.md"]
    while unread:
        path = unread.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = re.findall(r"\]\(([^)#\s]+)", path.read_text("utf-8"))
        unread += [(path.parent / name).resolve() for name in links if "://" not in name]
    assert not [str(path.relative_to(ROOT)) for path in PAGES if path not in reached]


def test_decisions_are_numbered_and_argued() -> None:
    names = sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    numbers = [name[:4] for name in names]
    assert len(set(numbers)) == len(numbers) and all(number.isdigit() for number in numbers), numbers
    for name in names:
        text = page(f"docs/decisions/{name}")
        assert text.startswith(f"# {name[:4]} "), name
        for word in ("**Choice.**", "**Reason.**", "**Cost.**", "**What would change our mind.**"):
            assert word in text, f"{name}: {word}"


def test_each_decision_has_a_status() -> None:
    rows = re.findall(
        r"^\| \[(\d{4})\]\(decisions/(\S+)\) \| (.+?) \| (.+?) \|$", page("docs/decisions.md"), re.M
    )
    assert [name for _, name, _, _ in rows] == sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    for number, name, title, status in rows:
        heading, _, first = page(f"docs/decisions/{name}").splitlines()[:3]
        assert heading == f"# {number} {title}", name
        by = re.fullmatch(r"(superseded(?: in part)? by) \[(\d{4})\]\(decisions/\S+\)", status)
        if by is None:
            assert status == "accepted" and "uperseded" not in first, name
        else:
            assert first.lower().startswith(f"*{by[1]} [{by[2]}]"), name


def test_each_guarantee_says_what_it_does_not_cover() -> None:
    text = page("docs/guarantees.md")
    names = re.findall(r"^\| \[?(G\d+)", text, re.MULTILINE)
    assert names == [f"G{number}" for number in range(1, 11)]
    for name in names:
        chapter = re.search(rf"^## {name} .*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert chapter and "Not covered:" in chapter[1], name


def test_the_markers_for_the_figures_are_there() -> None:
    assert re.search(r"^<!-- figures -->$.*^<!-- /figures -->$", page("docs/figures.md"), re.M | re.S)


# ---- controls ---------------------------------------------------------------------------------------------


def test_a_section_ends_where_the_next_begins() -> None:
    text = "# A\n## B\nb\n### C\nc\n## D\nd\n"
    assert section(text, "B") == "b\n### C\nc\n"
    assert section(text, "E") == ""


def test_first_cells_are_words() -> None:
    assert first_cells("| `--a` | x |\n| b, c | y |\nd | e |\n") >= {"--a", "b", "c"}
    assert "d" not in first_cells("d | e |") and "x" not in first_cells("| `--a` | x |")
