"""A copy of the package whose compiled modules check each memory access, and count their edges for the fuzzer.

gcc compiles them with AddressSanitizer and UBSan. The sanitizers' runtime is the library that comes with atheris.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".fuzz"
SITE, TEMP, COUNTERS = FOLDER / "site", FOLDER / "temp", FOLDER / "counters.so"
RUNTIME = "asan_with_fuzzer.so"
# Cython's own code converts functions to other types of functions, and copies no bytes from NULL.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr"]
FLAGS = [*SANITIZERS, "-fsanitize-coverage=trace-pc,trace-cmp", "-fno-omit-frame-pointer", "-O1"]
MARK = b"__asan_report_load1"  # in each module that is checked


def atheris_folder() -> Path:
    """Return the folder with the libraries of atheris. Raises SystemExit with the command that installs it."""
    spec = importlib.util.find_spec("atheris")
    if spec is None or spec.origin is None:
        raise SystemExit("fuzz: atheris is not installed: pip install atheris (its wheels need x86-64 Linux)")
    return Path(spec.origin).parents[1]


def build() -> dict[str, str]:
    """Build the copy. Returns the environment of a process that uses it. Raises SystemExit if gcc is missing."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise SystemExit("fuzz: no gcc to build with sanitizers; --plain fuzzes the modules as they are")
    SITE.mkdir(parents=True, exist_ok=True)
    build_environment = {**os.environ, "CC": " ".join([compiler, *FLAGS]), "LDSHARED": f"{compiler} -shared"}
    steps = ["build_py", f"--build-lib={SITE}", "build_ext", f"--build-lib={SITE}", f"--build-temp={TEMP}"]
    subprocess.run([sys.executable, "setup.py", "-q", *steps], cwd=ROOT, env=build_environment, check=True)
    source = Path(__file__).with_name("counters.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", COUNTERS, source], check=True)
    modules = list(SITE.rglob("*.so"))
    unchecked = [path.name for path in modules if MARK not in path.read_bytes()]
    if not modules or unchecked:
        raise SystemExit(f"fuzz: modules without a sanitizer: {unchecked or 'all'}")
    return environment()


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the copy, and has the sanitizers' runtime."""
    atheris = atheris_folder()
    preloaded = [COUNTERS, atheris / RUNTIME, "libstdc++.so.6"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [SITE, ROOT, atheris])),
        "LD_PRELOAD": " ".join(map(str, preloaded)),
        # Memory that Python and Arrow manage themselves would hide reads beyond an object.
        "PYTHONMALLOC": "malloc",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        # gcc and this runtime do not count the globals of a module in the same way.
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
