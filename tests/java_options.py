"""The options of the JVM in tests: a Spark of a test lives for seconds, most of which are its start."""

from __future__ import annotations

from pathlib import Path

ARCHIVE = Path(__file__).parent.parent / ".venv" / ".spark.jsa"  # written by class_archive.py
# The second compiler would take half of the CPU time of such a short life.
FAST_START = "-XX:TieredStopAtLevel=1"


def java_options() -> str:
    """Return the options. A JVM of another build, or with other jars, continues without the archive."""
    if not ARCHIVE.exists():
        return FAST_START
    return f"{FAST_START} -XX:SharedArchiveFile={ARCHIVE} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
