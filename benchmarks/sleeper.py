"""How long the machine keeps a process waiting that only sleeps: `python -m benchmarks.sleeper`.

It sleeps 5 ms over and over until its input is closed, and prints by how many milliseconds the longest sleep was too
long. What a broker is late by beside that is no fault of the broker's.
"""

from __future__ import annotations

import sys
import threading
import time

SLEEP_S = 0.005


def main() -> None:
    """Sleep until standard input is closed, and say what the longest sleep had too much."""
    told = threading.Thread(target=sys.stdin.read, daemon=True)
    told.start()
    worst_s = 0.0
    while told.is_alive():
        began_s = time.monotonic()
        time.sleep(SLEEP_S)
        worst_s = max(worst_s, time.monotonic() - began_s - SLEEP_S)
    print(worst_s * 1e3)


if __name__ == "__main__":
    main()
