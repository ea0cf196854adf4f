"""The package as users get it: the files of `make release`, installed outside of the tree, on each Python here.

`make wheel-check` runs this file alone. An editable installation (`make setup`) finds all files in `src`, built or
not. Only a wheel shows which files it lacks.

`make release` and `make slow` install the tools.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest
from deploy.release import VERSIONS, interpreter
from tests.cli.processes import Running, http_endpoint_of, serving
from tests.client.test_light import CLIENT, NEED, TALK, arguments
from tests.rounds import only_in_a_siege, rounds

from timeball import __version__

ROOT = Path(__file__).resolve().parents[1]
STUBS = "timeball/edges/grpc/_generated"
CLIENT_KB_MAX = 3_000
STUB_FILES = {"__init__.py", "definition_pb2.py", "definition_pb2.pyi", "service_pb2.py", "service_pb2.pyi"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.siege,  # with the wheels of all Pythons
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("wheel"),  # one release serves them all
    pytest.mark.skipif(
        not Path(sys.prefix, "release").exists(), reason="no auditwheel here: `make slow` installs it"
    ),
]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command without the package's source on the path. Returns its output, which a failure shows."""
    excluded = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    variables = {name: value for name, value in os.environ.items() if name not in excluded}
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env={**variables, **environment},
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def commit_of_the_tree(folder: Path) -> Path:
    """Copy the tracked files as they are now into a repository of their own, and commit them."""
    listing = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    assert not (folder / "src" / STUBS).exists(), "a clean tree has no stubs"
    git = ["git", "-C", folder, "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    run(*git, "init", "--quiet")
    run(*git, "add", "--all")
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-31T09:00:00Z")
    run(*git, "commit", "--quiet", "--message=release", **dates)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def release(folder: Path, **environment: str) -> Path:
    """Run `make release` there with the tools that are installed here. Return the folder of the files."""
    installed = [f"--old-file=.venv/{name}" for name in (".base", ".installed", ".built", "release")]
    # A wheel takes a minute to compile. Outside of a siege: the one for this Python and that of the stable ABI.
    versions = " ".join(rounds(1, 0) * [f"{sys.version_info[0]}.{sys.version_info[1]}"])
    run("make", "-C", folder, *installed, "release", f"PYTHONS={versions}", **environment)
    return folder / "dist"


@dataclass(frozen=True)
class Built:
    """The files of a release."""

    folder: Path
    sdists: list[Path]  # of the client and of the broker
    client: Path
    compiled: list[
        Path
    ]  # the broker's wheels for one version of Python each, then the one for the stable ABI
    pure: Path  # the broker's wheel with the codec in Python


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Release the tracked files as they are now."""
    if not list((ROOT / "src").rglob("*.so")):
        pytest.skip("no C compiler with Python's headers here")
    folder = release(commit_of_the_tree(tmp_path_factory.mktemp("clean")))
    (client,), (pure,), (stable,) = (
        folder.glob(name) for name in ("timeball-*.whl", "timeball_broker-*-none-any.whl", "*-abi3-*.whl")
    )
    for_versions = sorted(set(folder.glob("*.whl")) - {client, pure, stable})
    return Built(folder, sorted(folder.glob("*.tar.gz")), client, [*for_versions, stable], pure)


def test_a_release_has_sdist_wheels_bills_and_sums(built: Built) -> None:
    names = {path.name for path in built.folder.iterdir()}
    bills = {f"timeball-{lock}.cdx.json" for lock in ("client", "cli", "broker", "image", "all")}
    assert names == {
        *(path.name for path in [*built.sdists, built.client, *built.compiled, built.pure]),
        "SHA256SUMS",
        *bills,
    }
    checked = run("env", f"--chdir={built.folder}", "sha256sum", "--strict", "--check", "SHA256SUMS")
    assert set(re.findall(r"^(.+): OK$", checked, re.M)) == names - {"SHA256SUMS"}


@only_in_a_siege
def test_a_commit_gives_the_same_bytes_in_another_environment(built: Built, tmp_path: Path) -> None:
    """In a folder of another name, with other times and modes, in another zone."""
    tree = commit_of_the_tree(tmp_path / "another-name")
    for path in tree.rglob("*.py"):
        path.chmod(0o600)
    elsewhere = release(tree, TZ="Asia/Tokyo", LC_ALL="C", HOME=str(tmp_path))
    assert (elsewhere / "SHA256SUMS").read_text() == (built.folder / "SHA256SUMS").read_text()


def test_a_release_of_uncommitted_changes_is_refused(tmp_path: Path) -> None:
    tree = commit_of_the_tree(tmp_path / "changed")
    (tree / "src/timeball/left_over.py").write_text("")
    with pytest.raises(AssertionError, match="commit your changes first"):
        release(tree)


def compiled_modules(wheel: Path) -> list[str]:
    """Return the compiled modules of a wheel, which has no sources of them and no symbols for debuggers."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        assert not [name for name in names if name.endswith(".so") and b".debug_info" in files.read(name)]
    assert not [name for name in names if name.endswith((".c", ".pyx", ".pxd"))]
    return sorted(name for name in names if name.endswith(".so"))


def test_each_compiled_wheel_carries_the_whole_codec(built: Built) -> None:
    sources = [*(ROOT / "src").rglob("*.pyx"), ROOT / "src/timeball/edges/http2/hpack_decoder.py"]
    assert len(sources) > 1 and len(built.compiled) > 1
    for wheel in built.compiled:
        _, _, python, abi, platforms = wheel.name.removesuffix(".whl").split("-")
        assert platforms == f"manylinux_2_17_{platform.machine()}"
        end = (
            "abi3" if abi == "abi3" else f"cpython-{python.removeprefix('cp')}-{platform.machine()}-linux-gnu"
        )
        expected = [str(path.relative_to(ROOT / "src").with_suffix(f".{end}.so")) for path in sources]
        assert compiled_modules(wheel) == sorted(expected)
        assert (python, abi) == ("cp311", "abi3") or python == abi


def test_the_wheel_without_compiled_modules_is_for_every_machine(built: Built) -> None:
    assert compiled_modules(built.pure) == []
    assert built.pure.name.endswith("-py3-none-any.whl") and built.client.name.endswith("-py3-none-any.whl")


def contents_of(wheel: Path) -> tuple[set[str], Message]:
    """Return the names of a wheel's files, and its metadata."""
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, BytesParser().parsebytes(files.read(metadata))


def test_the_wheels_hold_each_file_once_and_the_page_for_the_registry(built: Built) -> None:
    (client, about), (broker, about_broker) = contents_of(built.client), contents_of(built.compiled[0])
    assert not client & broker
    assert {f"{STUBS}/{name}" for name in STUB_FILES} <= broker
    assert {"timeball/__init__.py", "timeball/py.typed", "timeball/client/timeball.py"} <= client
    assert {f"timeball/dashboard/{name}" for name in ("index.html", "frame.css", "pages/all.js")} <= broker
    assert {name.split("/")[0] for name in client | broker} == {
        "timeball", f"timeball-{__version__}.dist-info", f"timeball_broker-{__version__}.dist-info",
    }  # fmt: skip
    for fields in (about, about_broker):
        assert fields["Author"] and fields["Description-Content-Type"] == "text/markdown"
        assert "# Timeball" in str(fields.get_payload())
        classifiers = fields.get_all("Classifier", [])
        assert {f"Programming Language :: Python :: {version}" for version in VERSIONS} <= set(classifiers)
    assert {"broker", "spark", "picture", "all"} <= set(about.get_all("Provides-Extra", []))
    assert about_broker.get_all("Requires-Dist", []) == [f"timeball=={__version__}"]


def test_the_sdists_have_all_files_for_a_build(built: Built) -> None:
    expected = [
        {"src/timeball/py.typed"},
        {"setup.py", "src/timeball/__init__.py", "src/timeball/log/format.py"},
    ]
    assert [path.name.split("-")[0] for path in built.sdists] == ["timeball", "timeball_broker"]
    for path, files in zip(built.sdists, expected, strict=True):
        with tarfile.open(path) as sdist:
            names = {name.partition("/")[2] for name in sdist.getnames()}
        assert {"pyproject.toml", "README.md", "LICENSE", *files} <= names


def new_environment(python: str, folder: Path) -> list[str]:
    """Make an environment of this Python. Returns the command of the own pip that installs into it."""
    run(python, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    return [*pip, str(folder / "bin/python")]


# The installed files are not compiled, because few of them are imported.
QUICK = ["--quiet", "--no-compile", "--no-deps"]


@pytest.mark.parametrize("version", VERSIONS[:: rounds(4, 1)])
def test_installed_wheel_serves(built: Built, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    pip = new_environment(python, tmp_path / "env")
    run(*pip, "install", *QUICK, "--require-hashes", "-r", ROOT / "requirements/broker.txt")
    # pip chooses the wheel: the one for this version, or else that of the stable ABI.
    release = ("--no-index", "--find-links", built.folder)
    run(*pip, "install", "--quiet", "--no-compile", *release, "timeball[broker]")
    timeball = tmp_path / "env/bin/timeball"
    with served(timeball, tmp_path / "data") as (endpoint, exit_code):
        at = ("--endpoint", endpoint, "--json")
        run(timeball, "schedule", "orders", "close order 17 if unpaid", "--after", "1s", *at)
        (line,) = run(timeball, "pull", "orders", "--wait", "60s", *at).splitlines()
        assert json.loads(line)["body"] == "close order 17 if unpaid"
        codec = json.loads(run(timeball, "status", *at))["codec"]
        assert codec == "compiled"
    assert exit_code() == 0

    run(*pip, "install", *QUICK, "--force-reinstall", built.pure)
    with served(timeball, tmp_path / "data") as (endpoint, exit_code):
        assert json.loads(run(timeball, "status", "--endpoint", endpoint, "--json"))["codec"] == "python"
    assert exit_code() == 0

    # The control: without the stubs the same command must not start.
    (stubs,) = (tmp_path / "env/lib").glob(f"python*/site-packages/{STUBS}")
    shutil.rmtree(stubs)
    with pytest.raises(AssertionError, match="_generated"), served(timeball, tmp_path / "data"):
        pass


@pytest.mark.parametrize("version", VERSIONS[:: rounds(4, 1)])
def test_the_client_is_small(built: Built, tmp_path: Path, version: str) -> None:
    """It is installed for a program that only sends and receives. `du` counts also the bytecode that pip writes."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    pip, folder = new_environment(python, tmp_path / "env"), tmp_path / "env/lib"
    empty_kb = size_kb(folder)
    run(*pip, "install", "--quiet", "--no-deps", "--require-hashes", "-r", ROOT / "requirements/client.txt")
    run(*pip, "install", "--quiet", "--no-index", "--find-links", built.folder, "timeball")
    packages = json.loads(run(*pip, "list", "--format=json"))
    assert {package["name"] for package in packages} == {"timeball", "h11", "msgspec"}
    assert (folder / f"python{version}/site-packages/timeball/client/__pycache__").is_dir()
    size = size_kb(folder) - empty_kb
    print(f"the client on Python {version}: {size} kB, {len(packages)} packages")
    assert size <= CLIENT_KB_MAX


def size_kb(folder: Path) -> int:
    """Return the size of a folder by `du`."""
    return int(run("du", "-sk", folder).split()[0])


@only_in_a_siege
def test_the_client_gains_and_loses_the_broker(built: Built, tmp_path: Path) -> None:
    pip, timeball = new_environment(sys.executable, tmp_path / "env"), tmp_path / "env/bin/timeball"
    release = ("--no-index", "--find-links", built.folder)
    run(*pip, "install", *QUICK, "--require-hashes", "-r", ROOT / "requirements/client.txt")
    run(*pip, "install", "--quiet", *release, "timeball")
    run(*pip, "check")
    with pytest.raises(AssertionError, match=r"pip install '\.\[cli\]'"):
        run(timeball, "topics")
    run(*pip, "install", *QUICK, "--require-hashes", "-r", ROOT / "requirements/cli.txt")
    run(*pip, "install", "--quiet", *release, "timeball[cli]")
    run(*pip, "check")
    with serving(tmp_path / "data") as ready:
        endpoint, variables = http_endpoint_of(ready), {"TIMEBALL_FLIGHT": ready["endpoint"]}
        sent = run(timeball, "schedule", "light", "first", "--after", "1h", "--json", "--endpoint", endpoint)
        for words in TALK.values():
            words = [json.loads(sent)["id"] if word == "ID" else word for word in words]
            run(timeball, *words, TIMEBALL_ENDPOINT=endpoint, **variables)
        for words, extra in NEED.values():
            with pytest.raises(AssertionError, match=rf"pip install '\.\[{extra}\]'"):
                run(timeball, *arguments(words, tmp_path), **variables)
        run(*pip, "uninstall", "--quiet", "--yes", "timeball-broker")
        run(*pip, "check")
        python = tmp_path / "env/bin/python"
        assert run(python, "-c", CLIENT, endpoint).splitlines() == ["True visible", "cancelled"]
        with pytest.raises(AssertionError, match=r"timeball.testing is not installed: .*\[broker\]"):
            run(python, "-c", "import timeball.testing")


@contextmanager
def served(timeball: Path, data: Path) -> Iterator[tuple[str, object]]:
    """Run a broker of this installation. Yields its endpoint, and a call for its exit code after the block."""
    ports = [f"--{edge}-port=0" for edge in ("name-server", "remoting", "grpc", "http")]
    running = Running(
        command=[str(timeball), "serve", "--json", "--data", str(data), "--port", "0", *ports], PYTHONPATH=""
    )
    code: list[int] = []
    try:
        yield http_endpoint_of(running.wait_line(event="ready")), lambda: code[0]
    finally:
        code.append(running.end())
