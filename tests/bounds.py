"""How long a test waits for a process or a thread before it fails: a multiple of this process's own start time.

The start is that of this very process, from its creation to the import of this module (Python, pytest, its plugins):
it is measured in the same run, costs nothing, and grows with the load of the machine as everything else does. A fixed
number of seconds is too long on an idle machine and too short on a busy one.
"""

from __future__ import annotations

import time

import psutil

START_S = time.time() - psutil.Process().create_time()
STARTS = 150  # a broker starts in two or three, a Spark in twenty
LEAST_S = 30.0  # a machine that was idle at the start may be busy later
MOST_S = 240.0  # below the limit of pytest, whose message does not name the condition
BOUND_S = round(min(max(LEAST_S, STARTS * START_S), MOST_S))
