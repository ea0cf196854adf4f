#!/usr/bin/env bash
# Version: celery 5.7.0, tzdata 2026.6.
# Guess: crontab(minute="*") is due every minute, on every day.
# Seen: it is due at 01:59 for the last time before clocks go back in New York, and then at 02:00, 61 minutes later.
# For scheduled messages: a crontab that feeds a queue must be in UTC, or the queue is silent for an hour each autumn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet celery==5.7.0 tzdata==2026.6

PYTHONTZPATH="" "$folder/venv/bin/python" - <<'PYTHON'
import sys
from datetime import UTC, datetime, timedelta

from celery import Celery
from celery.schedules import crontab


def longest_pause_min(zone):
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    now = last = datetime(2026, 11, 1, 4, 55, tzinfo=UTC)
    schedule = crontab(minute="*", app=app, nowfun=lambda: now)
    runs = []
    while now < datetime(2026, 11, 1, 8, tzinfo=UTC):
        if schedule.is_due(last).is_due:
            last = now
            runs.append(now)
        now += timedelta(seconds=20)
    return max((after - before) / timedelta(minutes=1) for before, after in zip(runs, runs[1:]))


seen = longest_pause_min("UTC"), longest_pause_min("America/New_York")
print(f"longest pause of a crontab of every minute: {seen[0]:.0f} min in UTC, {seen[1]:.0f} min in New York")
if seen != (1, 61):
    sys.exit("the behaviour has changed")
PYTHON
