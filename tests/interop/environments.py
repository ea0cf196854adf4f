"""The stock clients' own packages, each in a separate folder below `.interop/`, made once and then kept.

`locks/` names each fetched package with the hashes of its files. The package clients (pip, npm, mvn, go) fetch them. A
function for a client raises Missing, with the reason, if its tools or packages are not available. A file with another
hash than the lock's is an error, never a reason to skip.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = HERE / "locks"
SOURCES = HERE / "java"
CACHE = HERE.parents[1] / ".interop"
FETCH_S = 600

# The errors of pip, npm and Go for a file that is not the locked one, or that no lock names.
WRONG_HASH = ("DO NOT MATCH THE HASHES", "EINTEGRITY", "checksum mismatch", "missing go.sum entry")

JAVA_OPTIONS = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


class Missing(Exception):
    """A client cannot be tested here. The text is the reason."""


# ---- the environments: a folder for each client, and the command that starts its driver -----------------------------


def cpp() -> list[str]:
    """Return the command of PyPI's `rocketmq`, the C++ client."""
    return [venv_python("cpp", LOCKS / "cpp.txt"), str(HERE / "cpp_client.py")]


def grpc_python() -> list[str]:
    """Return the command of PyPI's `rocketmq-python-client`."""
    return [venv_python("grpc_python", LOCKS / "grpc-python.txt"), str(HERE / "grpc_client.py")]


def ali_ons() -> list[str]:
    """Return the command of npm's `ali-ons`."""
    return node_with("ali_ons", LOCKS, HERE / "ali_ons.js")


def grpc_node() -> list[str]:
    """Return the command of npm's `rocketmq-client-nodejs`."""
    return node_with("grpc_node", LOCKS / "grpc", HERE / "grpc_client.js")


def grpc_go() -> list[str]:
    """Return the command of Go's `rocketmq-clients/golang/v5`."""
    go = tool("go", "golang-go")
    inputs = [LOCKS / "go" / "go.mod", LOCKS / "go" / "go.sum", HERE / "grpc_client.go"]

    def make(folder: Path) -> None:
        for each in inputs:
            shutil.copy(each, folder)
        fetch([go, "-C", str(folder), "list", "-deps", "."])  # what is compiled, and no module besides
        run([go, "-C", str(folder), "build", "-buildvcs=false", "-o", "client", "."])

    return [str(kept("grpc_go", inputs, make) / "client")]


def java(version: str, *options: str) -> list[str]:
    """Return the command of the Java client for the remoting protocol in a version (v4 or v5), with options of Java."""
    return java_with(version, "StockClient", SOURCES / version / "Version.java", options=options)


def java_5_5() -> list[str]:
    """Return the command of the Java client of 5.5.0, from the jars of RocketMQ itself."""
    return java_with("server", "StockClient", SOURCES / "v5" / "Version.java")


def grpc_java() -> list[str]:
    """Return the command of Maven's `rocketmq-client-java`."""
    return java_with("grpc", "GrpcClient")


def mqadmin() -> list[str]:
    """Return the command of RocketMQ's own administration tool, of 5.3.3."""
    return java_with("v5", "AdminTool")


def rocketmq(*options: str) -> list[str]:
    """Return the command prefix that runs a class of RocketMQ 5.5.0. For `benchmarks/versus`."""
    return [tool("java", "default-jdk"), *options, "-cp", f"{jars('server')}/*"]


def kafka(*options: str) -> list[str]:
    """Return the command prefix that runs a class of Kafka 4.3.1."""
    return [tool("java", "default-jdk"), *options, "-cp", f"{jars('kafka')}/*"]


def versus() -> list[str]:
    """Return a command whose parts exist where `make versus` can run: a C compiler and RocketMQ. Nothing runs it."""
    return [tool("cc", "gcc"), *rocketmq()]


def venv_python(name: str, lock: Path) -> str:
    """Return the Python of a virtual environment with exactly the packages of the lock."""

    def make(folder: Path) -> None:
        fetch([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        fetch([*pip, "--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", str(lock)])

    return str(kept(name, [lock], make, sys.version) / "bin/python")


def axe() -> Path:
    """Return npm's `axe-core`, a script that checks a page for accessibility faults. For `tests/dashboard`."""
    return node_modules("axe", LOCKS / "axe") / "axe-core" / "axe.min.js"


def pyright() -> list[str]:
    """Return the command of npm's `pyright`, a type checker."""
    script = node_modules("pyright", LOCKS / "pyright") / "pyright" / "index.js"
    return [tool("node", "nodejs"), str(script)]


def node_with(name: str, locks: Path, program: Path) -> list[str]:
    """Return the command of a program of Node with the packages that the lock in the folder `locks` names."""
    return ["env", f"NODE_PATH={node_modules(name, locks)}", tool("node", "nodejs"), str(program)]


def node_modules(name: str, locks: Path) -> Path:
    """Return the folder `node_modules` with the packages that the lock in the folder `locks` names."""
    npm = tool("npm", "npm")
    inputs = [locks / "package.json", locks / "package-lock.json"]

    def make(folder: Path) -> None:
        for lock in inputs:
            shutil.copy(lock, folder)
        # A lock without addresses: npm asks its registry where the files are, and checks them by their hashes.
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        locked = ["--omit=dev", "--ignore-scripts", "--omit-lockfile-registry-resolved"]
        fetch([npm, "ci", *quiet, *locked, "--prefix", str(folder)])

    return kept(name, inputs, make) / "node_modules"


def java_with(profile: str, program: str, *more: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command of a Java program of this folder, compiled with the jars of one profile of the pom.

    `more` has the sources beside the program's own, and `options` are options of Java.
    """
    folder, sources = jars(profile), [SOURCES / f"{program}.java", *more]

    def make(classes: Path) -> None:
        javac = [tool("javac", "default-jdk"), "-nowarn", "-d", str(classes), "-cp", f"{folder}/*"]
        run([*javac, *map(str, sources)])

    classes = kept(f"java_{profile}_classes", sources, make, str(folder))
    path = os.pathsep.join([str(classes), f"{folder}/*"])
    return [tool("java", "default-jdk"), *JAVA_OPTIONS, *options, "-cp", path, program]


def jars(version: str) -> Path:
    """Return the folder with the jars of one profile (`version`) of the pom. Raise ValueError as `check` does."""
    mvn, hashes = tool("mvn", "maven"), LOCKS / f"jars-{version}.sha256"

    def make(folder: Path) -> None:
        maven = [mvn, "--batch-mode", "--quiet", "-f", str(LOCKS / "pom.xml"), "-P", version]
        fetch(
            [*maven, "dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
        )
        check(folder, hashes.read_text())

    return kept(f"java_{version}_jars", [LOCKS / "pom.xml", hashes], make)


# ---- the folders of environments ----------------------------------------------------------------------------------


def kept(name: str, inputs: list[Path], make: Callable[[Path], None], *more: str) -> Path:
    """Return the folder that `make` has filled. Fill it if it does not exist, or if an earlier `make` was interrupted.

    The name of the folder contains a hash of the inputs and of `more`, so that changed inputs give another folder.
    """
    made_from = hashlib.sha256(
        b"\0".join([path.read_bytes() for path in inputs] + [m.encode() for m in more])
    )
    folder = CACHE / f"{name}-{made_from.hexdigest()[:12]}"
    with locked(CACHE / f"{name}.lock"):
        if not (folder / ".whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / ".whole").touch()
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock of all processes during a block, because two test runs may share the folder."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tool(name: str, package: str) -> str:
    """Return the path of a program. Raise Missing, with the Debian package, if it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise Missing(f"there is no {name} here (Debian's package is {package})")
    return found


def fetch(command: list[str]) -> None:
    """Run a package client. Raise Missing if it fails, but not for a package with a wrong hash: that is an error."""
    try:
        run(command)
    except (subprocess.SubprocessError, OSError) as error:
        output = str(getattr(error, "stdout", None) or error).strip()
        if any(words in output for words in WRONG_HASH):
            raise
        lines = output.splitlines()
        reason = " / ".join(lines[:1] + lines[1:][-2:])
        raise Missing(f"{Path(command[0]).name} could not fetch its packages: {reason}") from error


def run(command: list[str]) -> None:
    """Run a command. If it fails, print its output, and raise CalledProcessError, after FETCH_S TimeoutExpired."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=FETCH_S, check=False
    )
    if done.returncode:
        print(done.stdout)
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)


def check(folder: Path, hashes: str) -> None:
    """Raise ValueError if a jar is missing, is not in the list, or differs from its hash in the list.

    `hashes` has lines of a SHA-256 in hex and a file name.
    """
    listed = {name: digest for digest, name in (line.split() for line in hashes.splitlines())}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.jar")}
    if wrong := sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name)):
        raise ValueError(f"these jars are not what locks/ says: {', '.join(wrong)}")
