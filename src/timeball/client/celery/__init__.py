"""Celery on Timeball: kombu's transport `timeball://host:7480`. Needs the extra `celery`.

    from celery import Celery
    from timeball.client.celery import Control

    app = Celery("shop", broker="timeball://127.0.0.1:7480", control=Control)

The import registers the URL scheme with kombu. A task with an `eta` or a `countdown` is a scheduled message of the
broker, and workers receive it when it is due.

    control     `Control`: revoking a pending task cancels it at the broker
    transport   the transport: exchanges and queues of kombu as topics and groups
    link        the thread that receives messages, answers for them and renews their leases
    messages    messages of kombu as messages of Timeball, and back; no I/O
    redis_tasks moves pending tasks from Redis (`timeball import celery`)

    schedulers    the scheduler class of celery beat that stores its entries in the broker
    beat_entries  entries of celery beat as schedules of the broker, crontabs and intervals as their rules
"""

from kombu.transport import TRANSPORT_ALIASES

from timeball.client.celery.control import Control

__all__ = ["Control"]

# kombu imports the transport when a connection first needs it.
TRANSPORT_ALIASES["timeball"] = "timeball.client.celery.transport:Transport"
