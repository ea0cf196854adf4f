"""Build the sdists and the wheels of a release from one commit: `make release`.

    timeball-<version>.tar.gz                                           the client: its sdist
    timeball-<version>-py3-none-any.whl                                 and its wheel
    timeball_broker-<version>.tar.gz                                    all other modules: their sdist
    timeball_broker-<version>-cp3xx-cp3xx-manylinux_2_17_<machine>.whl  with the codec for one version of Python
    timeball_broker-<version>-cp311-abi3-manylinux_2_17_<machine>.whl   with the codec for all other versions
    timeball_broker-<version>-py3-none-any.whl                          with the codec in Python, for every machine

The wheels are built from the sdists with the tools of requirements/build.txt. The arguments are the folder of the
files, the folder of auditwheel, and the versions of Python. The default is each one from 3.11 to 3.14 that is on this
machine.

The same commit gives the same bytes with the same compiler and Pythons: times, owners and modes of the checkout do not
get into the files, nor do its paths.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from deploy.distributions import write_projects

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# The oldest C library that the compiled wheels are for. `auditwheel show` tells the one that they need.
GLIBC = (2, 17)
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
UV = Path(sys.executable).with_name("uv")


def main(arguments: list[str]) -> None:
    """Write the files of the commit that is checked out in the working directory."""
    out, tools = (Path(each).absolute() for each in arguments[:2])
    if run("git", "status", "--porcelain"):
        sys.exit("release: commit your changes first: a release is built from a commit")
    os.environ["SOURCE_DATE_EPOCH"] = run("git", "log", "-1", "--format=%ct").strip()
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="timeball-release-") as folder:
        archive, tree = Path(folder, "tree.tar"), Path(folder, "tree")
        run("git", "archive", f"--output={archive}", "HEAD")
        tree.mkdir()
        run("tar", "-xf", archive, "-C", tree)
        for project in write_projects(tree, Path(folder, "projects")):
            sdist = build(project, out, "--sdist")
            normalise(sdist, int(os.environ["SOURCE_DATE_EPOCH"]))
            build(sdist, out, "--wheel", CC="false")
        # Of the two, only the broker has modules to compile.
        build_compiled(sdist, out, tools, "cp311-abi3", "--py-limited-api=cp311")
        for version in arguments[2:] or VERSIONS:
            tag = "cp" + version.replace(".", "")
            if (found := interpreter(version)) is None:
                print(f"release: no Python {version} here: it gets the wheel of the stable ABI", flush=True)
                continue
            python = build_environment(found, Path(folder, tag), tree / "requirements/build.txt")
            build_compiled(sdist, out, tools, f"{tag}-{tag}", python=python)
    (out / ".gitignore").unlink(missing_ok=True)  # uv leaves it there


def run(*command: str | Path, **environment: str) -> str:
    """Run a command and return its output. If it fails, this program ends."""
    words = [str(word) for word in command]
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    if ran.returncode:
        sys.exit(f"release: {' '.join(words)} ended with code {ran.returncode}")
    return ran.stdout


def interpreter(version: str) -> str | None:
    """Find a Python of this version that runs: on the path, one of pyenv's, or one that uv has installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    beside = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    managed = [str(UV), "python", "find", "--no-python-downloads", "--managed-python", version]
    by_uv = subprocess.run(managed, capture_output=True, text=True).stdout.strip()
    for found in (shutil.which(f"python{version}"), *map(str, beside), by_uv):
        # A shim is on the path for versions that its owner has not switched on: it exits with 127.
        if (
            found
            and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0
        ):
            return found
    return None


def build_environment(python: str, folder: Path, lock_file: Path) -> Path:
    """Make an environment of this Python with the tools of the build. Returns the path of its Python."""
    run(python, "-m", "venv", "--without-pip", folder)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "--python",
        folder / "bin/python",
    )
    run(*pip, "install", "--no-compile", "--no-deps", "--require-hashes", "-r", lock_file)
    return folder / "bin/python"


def build(
    source: Path, out: Path, *options: str, python: str | Path = sys.executable, **environment: str
) -> Path:
    """Build an sdist or a wheel from a folder or an sdist, and return its path."""
    before = set(out.glob("timeball*"))
    uv = (UV, "build", "--quiet", "--no-build-isolation", "--python", python)
    run(*uv, "--out-dir", out, *options, source, **environment)
    (made,) = set(out.glob("timeball*")) - before
    print(f"release: {made.name}", flush=True)
    return made


def build_compiled(
    sdist: Path, out: Path, tools: Path, tag: str, *options: str, python: str | Path = sys.executable
) -> None:
    """Build a wheel with the compiled codec. End this program if it needs a newer C library than its name says."""
    options = (f"--plat-name={PLATFORM}", *options)
    settings = [f"--config-setting=--build-option={option}" for option in options]
    wheel = build(sdist, out, "--wheel", *settings, python=python)
    if f"{tag}-{PLATFORM}" not in wheel.name:
        sys.exit(f"release: {wheel.name} has no compiled codec: install a C compiler and Python's headers")
    shown = " ".join(run(tools / "auditwheel", "show", wheel).split())
    needed = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_\w+"', shown)
    if needed is None or (int(needed[1]), int(needed[2])) > GLIBC:
        sys.exit(f"release: build in an older system, with glibc {GLIBC[0]}.{GLIBC[1]}: {shown}")


def normalise(sdist: Path, time_s: int) -> None:
    """Write the sdist anew with one time for all files, without owners, and with no mode but `executable`.

    setuptools leaves these as they are in the tree (pypa/setuptools, issue 2133).
    """
    packed = io.BytesIO()
    with (
        tarfile.open(sdist) as old,
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=time_s) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            written = tarfile.TarInfo(member.name)
            written.type, written.size, written.mtime = member.type, member.size, time_s
            written.mode = 0o755 if member.mode & 0o100 else 0o644
            new.addfile(written, old.extractfile(member) if member.isfile() else None)
    sdist.write_bytes(packed.getvalue())


if __name__ == "__main__":
    main(sys.argv[1:])
