"""The map and the house agree: each room says what it does, each module has its test file, and
ARCHITECTURE.md draws the rooms: every folder of the package, every file beside them, and no missing one.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/timeball"
TESTS = ROOT / "tests"

ROOMS = [
    "log",
    "table",
    "schedule",
    "broker",
    "edges",
    "cluster",
    "spark",
    "edges/kafka",
    "dashboard",
]
ANATOMY = ["Receives:", "Keeps:", "Hands on:"]

# Module below src/timeball -> why it has no test file of its own. A folder ends with "/".
UNMIRRORED: dict[str, str] = {
    "client/django/management/": "Django looks for commands in this place; client/test_django.py runs them",
}


def opening_words(docstring: str) -> list[str]:
    """Return the anatomy words of a room in their order."""
    lines = [line.strip() for line in docstring.splitlines()]
    return [word for line in lines for word in ANATOMY if line.startswith(word)]


@pytest.mark.parametrize("room", ROOMS)
def test_room_says_what_it_receives_keeps_and_hands_on(room: str) -> None:
    door = PACKAGE / room / "__init__.py"
    if not door.exists():
        pytest.skip(f"{room} is not built yet")
    docstring = ast.get_docstring(ast.parse(door.read_text("utf-8"))) or ""
    assert opening_words(docstring) == ANATOMY


def mirrors(module: str) -> list[str]:
    """Return the places of a module's tests: log/format.py -> log/test_format.py, or test_log.py for a small room."""
    folder, _, name = module.rpartition("/")
    return [f"{folder}/test_{name}", mirrors(f"{folder}.py")[0]] if folder else [f"test_{name}"]


def is_tested(module: str) -> bool:
    """Check whether a module has a test file."""
    return any((TESTS / name).exists() for name in mirrors(module))


def excepted(module: str) -> str | None:
    """Return the entry of `UNMIRRORED` that covers this module."""
    for place in UNMIRRORED:
        if module == place or (place.endswith("/") and module.startswith(place)):
            return place
    return None


def modules() -> list[str]:
    """Return all modules that need a test file."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(
        path.as_posix() for path in paths if not path.name.startswith("__") and "_generated" not in path.parts
    )


def test_every_module_has_its_test_file() -> None:
    missing = [module for module in modules() if not excepted(module) and not is_tested(module)]
    assert not missing, "\n" + "\n".join(f"{module} needs tests/{mirrors(module)[0]}" for module in missing)


def test_every_exception_is_needed_and_has_a_reason() -> None:
    without = [module for module in modules() if not is_tested(module)]
    for place, reason in UNMIRRORED.items():
        assert len(reason.split()) >= 3, f"{place}: give a reason"
        assert place in {excepted(module) for module in without}, (
            f"{place} has its test file now: remove the entry"
        )


DRAWN_LINE = re.compile(r"( *)([\w./-]+(?:/|\.py))(?: .*)?")


def drawn(markdown: str) -> set[str]:
    """Return the paths of the drawing that begins with `src/timeball/`, below it; four spaces are one folder in."""
    block = re.search(r"^```text\nsrc/timeball/\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    paths, folders = set(), []
    for line in block[1].splitlines() if block else ():
        if entry := DRAWN_LINE.fullmatch(line):
            folders[len(entry[1]) // 4 - 1 :] = [entry[2]]
            paths.add("".join(folders))
    return paths


def rooms_and_files() -> set[str]:
    """Return the paths that the drawing must name: the folders with Python in them, and the files beside packages."""
    folders = {
        path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if "_generated" not in path.parts
    }
    rooms = {f"{folder.as_posix()}/" for folder in folders if folder.parts}
    return rooms | {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}


def absent(paths: set[str]) -> list[str]:
    """Return the drawn paths that are neither a folder nor a file of the package."""
    return sorted(path for path in paths if not (PACKAGE / path).exists())


def test_architecture_draws_the_rooms_and_the_files_beside_them() -> None:
    paths, expected = drawn((ROOT / "ARCHITECTURE.md").read_text("utf-8")), rooms_and_files()
    assert not absent(paths), f"drawn, but not there: {absent(paths)}"
    assert not expected - paths, f"there, but not drawn (a line each): {sorted(expected - paths)}"


def test_architecture_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines()) <= 250


# ---- controls: each check notices a breach ----------------------------------------------------------------


@pytest.mark.parametrize(
    "docstring",
    [
        "A room.",
        "A room.\n\nReceives: a\nHands on: c\n",
        "A room.\n\nKeeps: b\nReceives: a\nHands on: c\n",
    ],
)
def test_anatomy_check_sees_a_breach(docstring: str) -> None:
    assert opening_words(docstring) != ANATOMY


def test_anatomy_check_lets_pass_what_is_right() -> None:
    assert (
        opening_words("A room.\n\n    Receives: a\n    Keeps: b,\n      and more\n    Hands on: c\n")
        == ANATOMY
    )


def test_mirror_keeps_folders() -> None:
    assert mirrors("clock.py") == ["test_clock.py"]
    assert mirrors("schedule/hour_log/backlog.py") == [
        "schedule/hour_log/test_backlog.py",
        "schedule/test_hour_log.py",
    ]


DRAWING = """```text
src/timeball/
    clock.py    time
    log/        bytes that stay
        codec/  and a room in it
    cli/
```
"""


def test_map_check_reads_the_drawing_of_the_package_alone() -> None:
    other = "```bash\ncat log/nowhere.py\n```\n```text\n limbo/  a room\n```\nlog/nowhere.py\n"
    assert drawn(other + DRAWING) == {"clock.py", "log/", "log/codec/", "cli/"}


def test_map_check_sees_a_room_that_is_gone_and_one_that_is_missing() -> None:
    assert absent(drawn(DRAWING)) == ["clock.py", "log/codec/"]
    assert "broker/" in rooms_and_files() - drawn(DRAWING)
    assert not drawn("A page without a drawing.\n")
