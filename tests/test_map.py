"""The map and the house agree: each room says what it does, each module has its test file, and
ARCHITECTURE.md draws only what exists.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src/timeball"
TESTS = ROOT / "tests"

ROOMS = ["log", "table", "schedule", "broker", "protocols", "pipeline"]
ANATOMY = ["Receives:", "Keeps:", "Hands on:"]

# Module below src/timeball -> why it has no test file of its own. A folder ends with "/".
UNMIRRORED: dict[str, str] = {}


def opening_words(docstring: str) -> list[str]:
    """The anatomy lines of a room, in the order in which they stand."""
    lines = [line.strip() for line in docstring.splitlines()]
    return [word for line in lines for word in ANATOMY if line.startswith(word)]


@pytest.mark.parametrize("room", ROOMS)
def test_room_says_what_it_receives_keeps_and_hands_on(room: str) -> None:
    door = PACKAGE / room / "__init__.py"
    if not door.exists():
        pytest.skip(f"{room} is not built yet")
    docstring = ast.get_docstring(ast.parse(door.read_text("utf-8"))) or ""
    assert opening_words(docstring) == ANATOMY


def mirror(module: str) -> str:
    """log/format.py -> log/test_format.py"""
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name}" if folder else f"test_{name}"


def excepted(module: str) -> str | None:
    """The entry of `UNMIRRORED` that covers this module."""
    for place in UNMIRRORED:
        if module == place or (place.endswith("/") and module.startswith(place)):
            return place
    return None


def modules() -> list[str]:
    found = (p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))
    return sorted(p.as_posix() for p in found if not p.name.startswith("__") and "_generated" not in p.parts)


def test_every_module_has_its_test_file() -> None:
    missing = [m for m in modules() if not excepted(m) and not (TESTS / mirror(m)).exists()]
    assert not missing, "\n" + "\n".join(f"{m} wants tests/{mirror(m)}" for m in missing)


def test_every_exception_is_needed_and_says_why() -> None:
    without = [m for m in modules() if not (TESTS / mirror(m)).exists()]
    for place, reason in UNMIRRORED.items():
        assert len(reason.split()) >= 3, f"{place}: say why"
        assert place in {excepted(m) for m in without}, f"{place} has its test file now: take it out"


def drawn_paths(markdown: str) -> list[str]:
    """The paths in fenced drawings: words with a slash inside or at the end, and names of Python files.

    Blocks in a language (```bash) are no drawings; patterns (*, <name>, …) and addresses are no paths.
    """
    paths = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL):
        if language not in ("", "text"):
            continue
        for word in re.findall(r"[^\s,;()│├└─→]+", block):
            word = word.rstrip(".:")
            if re.fullmatch(r"[\w.\-]+(?:/[\w.\-]+)*(?:/|\.py)|[\w.\-]+(?:/[\w.\-]+)+", word):
                paths.append(word)
    return paths


def exists(path: str) -> bool:
    """From the root, from the package, or, for a bare name, anywhere in the house; `.py` may be left out."""
    bare = path.rstrip("/")
    for start in (ROOT, PACKAGE):
        if (start / bare).exists() or (start / f"{bare}.py").exists():
            return True
    return "/" not in bare and any(any(start.rglob(bare)) for start in (PACKAGE, TESTS, ROOT / "docs"))


def test_architecture_draws_what_exists() -> None:
    page = ROOT / "ARCHITECTURE.md"
    if not page.exists():
        pytest.skip("there is no ARCHITECTURE.md yet")
    paths = drawn_paths(page.read_text("utf-8"))
    assert paths, "ARCHITECTURE.md has no drawing"
    gone = [path for path in paths if not exists(path)]
    assert not gone, "drawn, but not there: " + ", ".join(gone)


# ---- controls: each check sees a breach -------------------------------------------------------------------


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
    assert mirror("clock.py") == "test_clock.py"
    assert mirror("schedule/hour_log/store.py") == "schedule/hour_log/test_store.py"


def test_map_check_sees_a_breach() -> None:
    drawing = "```\nlog/nowhere.py → (broker/neverwas)  gone.py\n  limbo/   a room\n```\n"
    paths = drawn_paths(drawing)
    assert paths == ["log/nowhere.py", "broker/neverwas", "gone.py", "limbo/"]
    assert not any(map(exists, paths))


def test_map_check_reads_only_drawings() -> None:
    assert drawn_paths("```bash\ncat log/nowhere.py\n```\nlog/nowhere.py\n") == []
    assert drawn_paths("```text\nschedule/<strategy>/store.py grpc://a:1 * keys\n```\n") == []


def test_map_check_finds_what_is_there() -> None:
    assert exists("src/timeball/py.typed")
    assert exists("tests/")
    assert exists("py.typed")
