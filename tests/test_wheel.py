"""The package as a stranger gets it: built from a clean tree, installed outside of it, on each Python that is here.

`make wheel-check` runs this file alone. An editable installation (`make setup`) finds what lies in `src`, built or
not; only a wheel shows what was left out of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path

import pytest
from tests.cli.processes import Running, http_endpoint_of, serving
from tests.client.test_light import NEED, TALK, arguments
from tests.rounds import only_in_a_siege, rounds

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ["3.11", "3.12", "3.13", "3.14"]
STUBS = "timeball/edges/grpc/_generated"
STUB_FILES = {"__init__.py", "definition_pb2.py", "definition_pb2.pyi", "service_pb2.py", "service_pb2.pyi"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("wheel"),  # one build serves them all
]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command without the package's source in reach; fail with what it printed."""
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}}
    said = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, **environment},
    )
    assert said.returncode == 0, f"{command}:\n{said.stdout[-4000:]}\n{said.stderr[-4000:]}"
    return said.stdout


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path
    pure: Path  # a wheel that was built where no C compiler is


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of the tracked files as they are now, and the wheel that is built from that sdist."""
    clean, out = tmp_path_factory.mktemp("clean"), tmp_path_factory.mktemp("dist")
    listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clean / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clean / name)
    assert not (clean / "src" / STUBS).exists(), "a clean tree has no stubs"
    # The tools are those of the lock file: what is tested is our build, not the newest setuptools.
    build = [Path(sys.executable).parent / "uv", "build", "--no-build-isolation", "--python", sys.executable]
    run(*build, "--out-dir", out, clean)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    run(*build, "--out-dir", out / "pure", "--wheel", sdist, CC="/nowhere/cc")
    (pure,) = (out / "pure").glob("*.whl")
    return Built(wheel, sdist, pure)


def compiled_modules(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        assert not [name for name in names if name.endswith(".so") and b".debug_info" in opened.read(name)]
    assert not [name for name in names if name.endswith((".c", ".pyx", ".pxd"))]
    return sorted(name for name in names if name.endswith(".so"))


def test_one_wheel_carries_the_compiled_codec_for_every_python(built: Built) -> None:
    sources = [*(ROOT / "src").rglob("*.pyx"), ROOT / "src/timeball/edges/http2/hpack_decoder.py"]
    wanted = sorted(str(path.relative_to(ROOT / "src").with_suffix(".abi3.so")) for path in sources)
    assert len(wanted) > 1
    if "none-any" in built.wheel.name:
        pytest.skip("no C compiler with Python's headers here")
    assert compiled_modules(built.wheel) == wanted
    assert "-cp311-abi3-" in built.wheel.name


def test_without_a_compiler_the_wheel_is_whole_and_for_every_machine(built: Built) -> None:
    assert compiled_modules(built.pure) == []
    assert built.pure.name.endswith("-py3-none-any.whl")


def test_wheel_holds_the_stubs_and_the_page_for_the_registry(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = BytesParser().parsebytes(wheel.read(metadata))
    assert {f"{STUBS}/{name}" for name in STUB_FILES} <= names
    assert "timeball/py.typed" in names
    assert {f"timeball/dashboard/{name}" for name in ("index.html", "frame.css", "pages/all.js")} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert fields["Author"] and fields["Description-Content-Type"] == "text/markdown"
    assert "# Timeball" in str(fields.get_payload())
    assert {"broker", "spark", "picture", "all"} <= set(fields.get_all("Provides-Extra", []))
    told = fields.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: {version}" for version in VERSIONS} <= set(told)


def test_sdist_can_be_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "src/timeball/py.typed"} <= names


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    beside = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for found in (shutil.which(f"python{version}"), *map(str, beside)):
        # A shim is on the path for versions that its owner has not switched on: it exits with 127.
        if (
            found
            and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
        ):
            return found
    return None


def new_environment(python: str, folder: Path) -> list[str]:
    """Make an environment of this Python; return the command of the pip that installs into it, which is ours."""
    run(python, "-m", "venv", "--without-pip", folder)
    ours = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
    return [*ours, str(folder / "bin/python")]


# Without compiling all that is installed: a fraction of it is imported.
QUICK = ["--quiet", "--no-compile", "--no-deps"]


@pytest.mark.siege
@pytest.mark.parametrize("version", VERSIONS[:: rounds(4, 1)])
def test_installed_wheel_serves(built: Built, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    install = [*new_environment(python, tmp_path / "env"), "install", *QUICK]
    run(*install, "--require-hashes", "-r", ROOT / "requirements/broker.txt")
    run(*install, built.wheel)
    timeball = tmp_path / "env/bin/timeball"
    with served(timeball, tmp_path / "data") as (endpoint, ended):
        at = ("--endpoint", endpoint, "--json")
        run(timeball, "schedule", "orders", "close order 17 if unpaid", "--after", "1s", *at)
        (line,) = run(timeball, "pull", "orders", "--wait", "60s", *at).splitlines()
        assert json.loads(line)["body"] == "close order 17 if unpaid"
        codec = json.loads(run(timeball, "status", *at))["codec"]
        assert codec == ("compiled" if compiled_modules(built.wheel) else "python")
    assert ended() == 0

    run(*install, "--force-reinstall", built.pure)
    with served(timeball, tmp_path / "data") as (endpoint, ended):
        assert json.loads(run(timeball, "status", "--endpoint", endpoint, "--json"))["codec"] == "python"
    assert ended() == 0

    # The control: without the stubs, as the wheel once was, the same command must not start.
    (stubs,) = (tmp_path / "env/lib").glob(f"python*/site-packages/{STUBS}")
    shutil.rmtree(stubs)
    with pytest.raises(AssertionError, match="_generated"), served(timeball, tmp_path / "data"):
        pass


@pytest.mark.siege
@only_in_a_siege
def test_the_plain_wheel_is_a_client(built: Built, tmp_path: Path) -> None:
    pip, timeball = new_environment(sys.executable, tmp_path / "env"), tmp_path / "env/bin/timeball"
    run(*pip, "install", *QUICK, "--require-hashes", "-r", ROOT / "requirements/client.txt")
    run(*pip, "install", *QUICK, built.wheel)
    run(*pip, "check")
    with pytest.raises(AssertionError, match=r"pip install '\.\[cli\]'"):
        run(timeball, "topics")
    run(*pip, "install", *QUICK, "--require-hashes", "-r", ROOT / "requirements/cli.txt")
    with serving(tmp_path / "data") as ready:
        endpoint, where = http_endpoint_of(ready), {"TIMEBALL_FLIGHT": ready["endpoint"]}
        sent = run(timeball, "schedule", "light", "first", "--after", "1h", "--json", "--endpoint", endpoint)
        for words in TALK.values():
            words = [json.loads(sent)["id"] if word == "ID" else word for word in words]
            run(timeball, *words, TIMEBALL_ENDPOINT=endpoint, **where)
        for words, extra in NEED.values():
            with pytest.raises(AssertionError, match=rf"pip install '\.\[{extra}\]'"):
                run(timeball, *arguments(words, tmp_path), **where)


@contextmanager
def served(timeball: Path, data: Path) -> Iterator[tuple[str, object]]:
    """A broker of this installation: its endpoint, and its exit code once it has been left."""
    ports = [f"--{edge}-port=0" for edge in ("name-server", "remoting", "grpc", "http")]
    running = Running(
        command=[str(timeball), "serve", "--json", "--data", str(data), "--port", "0", *ports], PYTHONPATH=""
    )
    code: list[int] = []
    try:
        yield http_endpoint_of(running.wait_line(event="ready")), lambda: code[0]
    finally:
        code.append(running.end())
