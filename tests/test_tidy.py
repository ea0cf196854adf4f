"""The house rules as tests. Each rule is a function from a source to its violations, and each rule has a
control: a snippet that it must flag, so that a rule which has stopped working is noticed.

A permitted violation is in `ALLOWED`, with the reason. An entry that is no longer needed fails.
"""

import ast
import inspect
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

import pytest

from timeball.broker.service import Broker

ROOT = Path(__file__).resolve().parents[1]

# With test_prose.py in one process, which then reads and tokenizes the package once.
pytestmark = pytest.mark.xdist_group("source")

MAX_FILE_LINES = 800  # one subject may need them; a file of two subjects is split
MAX_DESIGN_LINES = 700  # of a design without comment lines: an hour's reading
MAX_FUNCTION_LINES = 60  # code lines: without docstring, comments and blank lines
LONG_FUNCTION_LINES = 40
MAX_SHARE_OF_LONG_FUNCTIONS = 0.03  # a ratchet: lower it when the share is lower

# (rule, file or folder below src/timeball, why). A folder ends with "/".
ALLOWED: list[tuple[str, str, str]] = [
    ("reads_clock", "io/clock.py", "the one place where time comes from"),
    ("touches_disk", "io/files.py", "the one place where the disk is touched"),
    ("touches_disk", "model/time_parsing.py", "the tables of the installed package tzdata, and no data"),
    ("touches_disk", "cli/", "a command reads and writes the files that its user names"),
    ("touches_disk", "edges/http/edge.py", "the installed package's own files, and no data"),
    ("touches_disk", "client/credentials.py", "the roots that its user names, where no broker runs"),
    ("touches_disk", "edges/kafka/records.py", "the file that its user names, where no broker runs"),
    ("touches_disk", "spark/", "jobs write reports and wrappers where no broker runs"),
]


@dataclass(frozen=True)
class Source:
    """One Python file, parsed once for all rules."""

    path: PurePosixPath  # below src/timeball
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree. A walk takes longer than any rule over the nodes."""
        return list(ast.walk(self.tree))

    @property
    def comments(self) -> dict[int, str]:
        """Line number -> comment."""
        return self._lines[0]

    @property
    def code_lines(self) -> set[int]:
        """The lines with code: no docstring, no comment, not blank."""
        return self._lines[1]

    @cached_property
    def _lines(self) -> tuple[dict[int, str], set[int]]:
        """The comments and the code lines, from one reading of the tokens."""
        blank = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
        comments: dict[int, str] = {}
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
            elif token.type not in blank:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if is_documented(node):
                docstring = node.body[0]
                lines.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
        return comments, lines

    @cached_property
    def docstrings(self) -> list[str]:
        """The docstring of the module, "" if it has none, and those of its classes and functions."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        below = (ast.get_docstring(node) for node in self.nodes if isinstance(node, kinds))
        return [ast.get_docstring(self.tree) or "", *(text for text in below if text)]

    @cached_property
    def functions(self) -> list[tuple[str, int, int]]:
        """Name, line, number of code lines of every function."""
        functions = []
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                functions.append((node.name, node.lineno, len(self.code_lines.intersection(span))))
        return functions

    @cached_property
    def names(self) -> list[tuple[str, int]]:
        """Every used name in full (`from time import time as t; t()`: time.time), and its line."""
        full: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                full.update({alias.asname: alias.name for alias in node.names if alias.asname})
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                full.update(
                    {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                )
        used = []
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and (dotted := dotted_name(node)):
                head, dot, tail = dotted.partition(".")
                used.append((full.get(head, head) + dot + tail, node.lineno))
        return used


def is_documented(node: ast.AST) -> bool:
    """Check whether a node has a docstring."""
    scopes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None


def dotted_name(node: ast.AST) -> str | None:
    """Return the name of an expression with all its dots, or None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted_name(node.value)):
        return f"{head}.{node.attr}"
    return None


# ---- the rules: from a source to its breaches, "line: what" -----------------------------------------------

CLOCKS = {
    "time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns",
    "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today",
}  # fmt: skip
DISK = {
    "open", "io.open", "os.open", "os.fsync", "os.fdatasync", "mmap.mmap",
    "pyarrow.OSFile", "pyarrow.memory_map", "pyarrow.create_memory_map",
}  # fmt: skip
PATH_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_NAMES = {"eval", "exec", "yaml.load", "yaml.unsafe_load"}
VERBS_OF_A_CALLER = {
    name for name, verb in vars(Broker).items()
    if inspect.isfunction(verb) and "caller" in inspect.signature(verb).parameters
}  # fmt: skip
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}


def too_long(source: Source) -> Iterator[str]:
    """A file has a bounded number of lines."""
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{lines}: a file has at most {MAX_FILE_LINES} lines; these are two subjects"


def function_too_long(source: Source) -> Iterator[str]:
    """A function has a bounded number of code lines."""
    for name, line, length in source.functions:
        if length > MAX_FUNCTION_LINES:
            yield f"{line}: {name} has {length} code lines, at most {MAX_FUNCTION_LINES} are allowed"


def undocumented(source: Source) -> Iterator[str]:
    """A module has a docstring."""
    if not (ast.get_docstring(source.tree) or "").strip():
        yield "1: a module opens with its argument, as a docstring"


def reads_clock(source: Source) -> Iterator[str]:
    """Only io/clock.py reads a clock."""
    for name, line in source.names:
        if name in CLOCKS:
            yield f"{line}: {name}: only io/clock.py reads a clock; take the time as an argument"


def touches_disk(source: Source) -> Iterator[str]:
    """Only io/files.py uses the disk."""
    for name, line in source.names:
        if name in DISK:
            yield f"{line}: {name}: only io/files.py opens, maps or syncs; take the files as an argument"
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in PATH_METHODS or (node.func.attr == "open" and is_path(node.func.value)):
            yield f"{node.lineno}: Path.{node.func.attr}: only io/files.py opens a file"


def is_path(node: ast.expr) -> bool:
    """Check whether an expression looks like a pathlib path: `Path(…)`, `a / b`, `path`, `self.data_path`."""
    if isinstance(node, ast.Call):
        return (dotted_name(node.func) or "").endswith("Path")
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div)
    return re.search(r"(?:^|[._])path$", dotted_name(node) or "") is not None


def unsafe(source: Source) -> Iterator[str]:
    """No input is run as code."""
    for name, line in source.names:
        if name in UNSAFE_NAMES:
            yield f"{line}: {name} runs what it is given"
    for node in source.nodes:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if module.split(".")[0] in UNSAFE_MODULES:
                yield f"{node.lineno}: {module} runs what it reads"


def broad_except(source: Source) -> Iterator[str]:
    """A broad except has a reason."""
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"{node.lineno}: a bare except also catches the wish to stop; name what is expected"
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {dotted_name(kind) for kind in caught}
        if names & {"Exception", "BaseException"} and not has_reason(source, node.lineno):
            yield f"{node.lineno}: a broad except says why, in a comment above, beside or below it"


def has_reason(source: Source, line: int) -> bool:
    """Check for a comment of three words or more, on the line or next to it. A linter's pragma is no reason."""
    for comment in (source.comments.get(near, "") for near in (line - 1, line, line + 1)):
        words = re.sub(r"(noqa|type: ignore|pragma)\S*( [A-Z]+\d+)*", "", comment)
        if len(re.findall(r"[A-Za-z]{2,}", words)) >= 3:
            return True
    return False


LOGGERS = {"logger", "log", "LOG", "failures.log"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LOG_LINE = re.compile(r"[A-Za-z][^%=]*( [a-z_]+=(%[.\d]*[a-z]|\w+))*")


def log_line(source: Source) -> Iterator[str]:
    """A log line has an event in constant words, then `name=value` for each varying value."""
    for node in source.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
            continue
        logger, _, level = (dotted_name(node.func) or "").rpartition(".")
        if (logger in LOGGERS and level in LEVELS) or (not logger and level == "log" and node.args):
            text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if not LOG_LINE.fullmatch(str(text)):
                yield f"{node.lineno}: {text!r} should be as 'segment cut file=%s reason=%s'"


def unnamed_caller(source: Source) -> Iterator[str]:
    """An edge passes the caller to the broker, which otherwise decides as if access were not controlled."""
    if source.path.parts[0] != "edges":
        return
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defaults = [dotted_name(default) for default in node.args.defaults]
            if "ANONYMOUS" in defaults:
                yield f"{node.lineno}: {node.name}: a function of an edge has no default caller"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, verb = dotted_name(node.func.value) or "", node.func.attr
        if owner.rpartition(".")[2] not in ("broker", "_broker") or verb not in VERBS_OF_A_CALLER:
            continue
        named = [
            dotted_name(argument) or ""
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]
        ]
        if not any(name.rpartition(".")[2] == "caller" for name in named):
            yield f"{node.lineno}: {owner}.{verb}() without its caller does as ANONYMOUS"


def vague_name(source: Source) -> Iterator[str]:
    """A file or folder has no vague name."""
    for part in source.path.with_suffix("").parts:
        if part.strip("_") in VAGUE_NAMES:
            yield f"1: {part!r} says nothing about what is in it"


RULES: list[Callable[[Source], Iterator[str]]] = [
    too_long, function_too_long, undocumented, reads_clock, touches_disk, unsafe, broad_except, vague_name, log_line,
    unnamed_caller,
]  # fmt: skip


# ---- rules for every tracked text file --------------------------------------------------------------------

# The patterns are in two halves, because this file would breach them otherwise.
LEFTOVER = re.compile(r"\b(?:FIX" + r"ME|X" + r"XX)\b")
MACHINE_PATH = re.compile(r"(?<![\w.\-])/(?:ro" + r"ot|tmp/scr" + r"atch|wo" + r"rk)(?=/|\b(?![\w\-]))")
DOWNLOAD = re.compile(
    r"https?://\S+\.(?:whl|tar\.gz|tgz|zip|jar|pom|crate|deb)\b"
    r"|https?://\S+/simple\b"
    r"|--(?:extra-)?index-" + r"url\b(?=[ =]+\S*://)"
)


def text_breaches(path: str, text: str) -> Iterator[str]:
    """Yield the breaches of the rules for text files."""
    for number, line in enumerate(text.splitlines(), 1):
        if LEFTOVER.search(line):
            yield f"{path}:{number}: a leftover; do it, or open an issue"
        if MACHINE_PATH.search(line):
            yield f"{path}:{number}: a path of one machine"
        if DOWNLOAD.search(line) or (path.startswith("requirements/") and "://" in line):
            yield f"{path}:{number}: a download address; the package client knows where"


def tracked_files() -> list[str]:
    """Return the names of all files that git tracks."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode:
        pytest.skip("not a git work tree")
    return [name for name in listing.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


# ---- the tests --------------------------------------------------------------------------------------------


@cache
def sources() -> list[Source]:
    """Read the package once for each process: to parse and tokenize it takes seconds."""
    package = ROOT / "src/timeball"
    files = sorted(path for path in package.rglob("*.py") if "_generated" not in path.parts)
    return [Source(PurePosixPath(path.relative_to(package)), path.read_text("utf-8")) for path in files]


@pytest.fixture(scope="module")
def house() -> list[Source]:
    """Return the sources of the package."""
    return sources()


def allowance(rule: str, path: str) -> str | None:
    """Return the entry of `ALLOWED` that covers this file."""
    for name, place, _ in ALLOWED:
        if name == rule and (path == place or (place.endswith("/") and path.startswith(place))):
            return place
    return None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_is_kept(rule: Callable[[Source], Iterator[str]], house: list[Source]) -> None:
    breaches = [
        f"src/timeball/{source.path}:{breach}"
        for source in house
        if not allowance(rule.__name__, str(source.path))
        for breach in rule(source)
    ]
    assert not breaches, "\n" + "\n".join(breaches)


def test_every_allowance_names_a_place_and_a_reason(house: list[Source]) -> None:
    names = {rule.__name__ for rule in RULES}
    paths = {str(source.path) for source in house}
    for rule, place, reason in ALLOWED:
        assert rule in names, rule
        assert len(reason.split()) >= 3, f"{place}: give a reason"
        exists = place in paths or any(path.startswith(place) for path in paths if place.endswith("/"))
        assert exists, f"{place} does not exist: remove it from ALLOWED"


def test_few_functions_are_long(house: list[Source]) -> None:
    functions = [(source.path, *function) for source in house for function in source.functions]
    long = [
        f"{path}:{line}: {name} {length}"
        for path, name, line, length in functions
        if length > LONG_FUNCTION_LINES
    ]
    allowed = max(1, int(len(functions) * MAX_SHARE_OF_LONG_FUNCTIONS))
    assert len(long) <= allowed, f"{len(long)} of {len(functions)} functions are long:\n" + "\n".join(long)


@pytest.mark.parametrize("design", ["hour_log", "timer_wheel", "level_cascade", "delay_levels"])
def test_a_design_is_read_in_an_hour(design: str) -> None:
    text = (ROOT / f"src/timeball/schedule/{design}.py").read_text()
    lines = sum(not line.lstrip().startswith("#") for line in text.splitlines())
    assert 100 <= lines <= MAX_DESIGN_LINES


def test_tracked_files_have_no_paths_of_machines_no_downloads_and_no_leftovers() -> None:
    breaches: list[str] = []
    for name in tracked_files():
        try:
            breaches += text_breaches(name, (ROOT / name).read_text("utf-8"))
        except UnicodeDecodeError:  # a picture, or recorded bytes
            continue
    assert not breaches, "\n" + "\n".join(breaches)


CONTROLS = [
    (too_long, "x.py", "a = 1\n" * (MAX_FILE_LINES + 1)),
    (function_too_long, "x.py", "def f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES),
    (undocumented, "x.py", "import os\n"),
    (undocumented, "__init__.py", ""),
    (reads_clock, "x.py", "import time\nnow = time.time()\n"),
    (reads_clock, "x.py", "from time import monotonic as m\nnow = m()\n"),
    (reads_clock, "x.py", "import time as t\nfield(default_factory=t.time_ns)\n"),
    (reads_clock, "x.py", "from datetime import datetime, UTC\nnow = datetime.now(UTC)\n"),
    (touches_disk, "x.py", "f = open('a')\n"),
    (touches_disk, "x.py", "import os\nos.fsync(os.open('a', 0))\n"),
    (touches_disk, "x.py", "from mmap import mmap\nm = mmap(3, 0)\n"),
    (touches_disk, "x.py", "text = self.place.read_text()\n"),
    (touches_disk, "x.py", "with Path('a').open() as f: pass\n"),
    (touches_disk, "x.py", "with (folder / 'a').open() as f: pass\n"),
    (touches_disk, "x.py", "import pyarrow as pa\nm = pa.memory_map('a')\n"),
    (unsafe, "x.py", "from pickle import loads\n"),
    (unsafe, "x.py", "x = eval('1')\n"),
    (unsafe, "x.py", "import yaml\nx = yaml.load(f)\n"),
    (broad_except, "x.py", "try:\n    a()\nexcept:  # whatever happens here\n    pass\n"),
    (broad_except, "x.py", "try:\n    a()\nexcept Exception:  # noqa: BLE001\n    pass\n"),
    (broad_except, "x.py", "try:\n    a()\nexcept (OSError, Exception):\n    pass\n"),
    (vague_name, "log/utils.py", ""),
    (log_line, "x.py", "logger.warning('%s: %s', name, error)"),
    (log_line, "x.py", "logger.info('cut %d bytes', size)"),
    (log_line, "x.py", "failures.log.error(f'cut {size} bytes')"),
    (vague_name, "helpers/format.py", ""),
    (unnamed_caller, "edges/http/a.py", "await self._broker.offsets(group, topic)\n"),
    (unnamed_caller, "edges/http/a.py", "def f(broker, caller: Caller = ANONYMOUS): pass\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), CONTROLS)
def test_rule_flags_a_breach(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert list(rule(Source(PurePosixPath(path), text)))


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (function_too_long, "def f():\n    '''\n" + "    a\n" * 90 + "    '''\n" + "    # a\n\n" * 90),
        (log_line, "logger.warning('segment cut file=%s size_s=%.1f reason=%s', name, size, error)"),
        (log_line, "math.log(2)\nlogger.info('stopped')\n"),
        (reads_clock, "now = clock.time()\nself.time.time()\ntime.sleep(1)\n"),
        (touches_disk, "f = files.open('a')\nself.files.open(path)\n"),
        (
            broad_except,
            "try:\n    a()\n# One bad job must not end the others.\nexcept Exception:\n    pass\n",
        ),
    ],
)
def test_rule_lets_pass_what_is_right(rule: Callable[[Source], Iterator[str]], text: str) -> None:
    assert not list(rule(Source(PurePosixPath("x.py"), text)))


def test_text_rules_flag_a_breach() -> None:
    slash = "/"
    for line in ("# FIX" + "ME later", f"cd {slash}root", f"{slash}work/main", f"'{slash}tmp/scratch'"):
        assert list(text_breaches("a.md", line)), line
    host = "https:" + "//host"
    for line in (f"{host}/a-1.0.tar.gz", f"{host}/simple", f"pip install --index-url {host}"):
        assert list(text_breaches("a.md", line)), line
    assert list(text_breaches("requirements/all.txt", host))
    for line in ("a/root/b", "src/work/x", f"{slash}workers", f"{slash}root-less", "see " + host + "/page"):
        assert not list(text_breaches("a.md", line)), line
