"""The machine that figures were measured on, as the page names it."""

from __future__ import annotations

import os
import platform
import tempfile
from pathlib import Path

import psutil

BUSY_SHARE = 0.25  # of the cores, at work before a run begins


def describe() -> dict[str, str]:
    """Return CPU model, cores, memory, kernel and the disk under the temporary folder."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "CPU": ", ".join(sorted(models)) or platform.machine(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "disk": _disk(Path(tempfile.gettempdir())),
        "Python": platform.python_version(),
    }


def load_average() -> float:
    """Return how many processes wanted a core in the last minute."""
    return os.getloadavg()[0]


def is_busy(before: float) -> bool:
    """Return whether the machine did other work when a run began."""
    return before > BUSY_SHARE * (os.cpu_count() or 1)


def _disk(folder: Path) -> str:
    """The device and file system of the mount that holds this folder."""
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    if not mounts:
        return "unknown"
    mount = max(mounts, key=lambda each: len(each.mountpoint))
    name = Path(mount.device).name
    models = (
        Path("/sys/class/block", name, "device/model"),
        Path("/sys/class/block", name, "..", "device/model"),
    )
    model = next((path.read_text().strip() for path in models if path.is_file()), "")
    return " ".join(word for word in (name, model, mount.fstype) if word)
