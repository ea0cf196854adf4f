"""The scheduler class for `celery beat` that stores its entries in the broker.

    celery -A shop beat -S timeball.client.celery.schedulers:TimeballScheduler

The broker sends the tasks. Beat is needed only to change the schedules: it stores them when it starts, and again when
the app changes them at run time.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

from celery.app.utils import find_app
from celery.beat import Scheduler

from timeball.client.celery.beat_entries import BeatSchedule, read_entries, store_entries
from timeball.client.schedules import Schedules
from timeball.model.errors import OverLimit, RequestError, Unavailable

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class TimeballScheduler(Scheduler):
    """A scheduler of celery beat. Entries of the configuration become schedules in the broker."""

    _stored: Any = None  # a copy of the entries that were stored last

    def setup_schedule(self) -> None:
        """Read the entries of the configuration. Nothing is stored yet."""
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)

    def read(self) -> list[BeatSchedule]:
        """Build the schedules of all entries. Raises RequestError, which names the entries that are refused."""
        return read_entries(self.app, self.connection, self.schedule)

    def store(self, schedules: Schedules) -> tuple[list[str], list[str]]:
        """Store all entries. Returns the names of changed and of deleted schedules. Raises as `store_entries`."""
        owner = self.connection.transport.topic(self.app.main or "celery")
        return store_entries(schedules, owner, self.read())

    def tick(self, *arguments: Any, **options: Any) -> float:
        """Store the entries if they have changed. Returns the number of seconds until the next call.

        Raises RequestError for entries that are refused. If no broker answers, the next call tries again.
        """
        if self.schedules_equal(self._stored, self.schedule):
            return float(self.max_interval)
        self._ensure_connected()
        try:
            changed, deleted = self.store(self.connection.default_channel.schedules)
        except (Unavailable, OverLimit) as error:
            logger.warning("schedules not stored, trying again reason=%s", error)
            return RETRY_S
        self._stored = copy.copy(self.schedule)
        logger.info("schedules stored entries=%d changed=%s deleted=%s", len(self.schedule), changed, deleted)
        return float(self.max_interval)

    @property
    def info(self) -> str:
        """A line for the banner of beat."""
        return "    . schedules -> in the broker, which sends the tasks"


def scheduler_of(app_name: str) -> TimeballScheduler:
    """Build the scheduler of an app, which is imported as by `celery -A`. Raises RequestError if that fails."""
    try:
        app = find_app(app_name)
        app.loader.import_default_modules()
        app.finalize()
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"{app_name}: {error}; name the app as for `celery -A`, for example shop:app"
        ) from error
    except Exception as error:  # the modules of the app may raise any error
        raise RequestError(
            f"{app_name}: its import failed: {type(error).__name__}: {error}; start the command in the app's "
            "environment, for example with its environment variables"
        ) from error
    return TimeballScheduler(app)
