"""`timeball schedules import celery-beat`: make a schedule of each entry of an app's `beat_schedule`."""

from __future__ import annotations

from typing import Annotated

import typer

from timeball.cli.options import (
    CELERY,
    DEFAULT_ENDPOINT,
    EndpointOption,
    JsonOption,
    connect,
    is_third_party,
    not_installed,
)
from timeball.cli.output import show

_AppArgument = Annotated[str, typer.Argument(metavar="APP", help="The app, as for `celery -A`.")]
_Dry = typer.Option("--dry-run", help="Show the schedules, and put none.")


def celery_beat(
    app: _AppArgument,
    dry_run: Annotated[bool, _Dry] = False,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Make a schedule of each entry of an app's beat_schedule.

    The same as a start of celery beat with the scheduler class of Timeball: the
    broker then sends the tasks, and no beat has to run. Schedules of the app
    whose entries are gone are deleted. The command can be repeated.

    \b
    Examples:
      timeball schedules import celery-beat shop --dry-run
      timeball schedules import celery-beat shop:app --json
    """
    try:
        from timeball.client.celery.schedulers import scheduler_of
    except ModuleNotFoundError as error:
        if not is_third_party(error):
            raise
        raise not_installed(error, CELERY) from error
    scheduler = scheduler_of(app)
    if dry_run:
        for each in scheduler.read():
            rule = ", ".join(f"{key} {value}" for key, value in each.rule.items())
            show(each, [f"{each.name}: would be put, {rule}, {each.tag} to {each.topic}"], as_json=as_json)
        return
    with connect(endpoint) as client:
        changed, deleted = scheduler.store(client.schedules)
    lines = [*(f"{name}: put" for name in changed), *(f"{name}: deleted" for name in deleted)]
    show({"put": changed, "deleted": deleted}, lines or ["nothing has changed"], as_json=as_json)
