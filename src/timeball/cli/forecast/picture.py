"""A forecast as a picture: messages due over time, and below it the messages that wait for consumers.

Drawn without a display. The colours can be distinguished by the colour-blind and in grey.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from timeball.cli.forecast.options import OTHER_TOPICS
from timeball.cli.forecast.report import Answer, show_version
from timeball.cli.options import PICTURE, not_installed
from timeball.model.errors import RequestError, SetupError
from timeball.spark.views.consumer_model import FloatArray
from timeball.spark.views.due_histogram import UNIT_S, Load, Unit, merge

KINDS = (".png", ".svg", ".pdf")
TOPICS_SHOWN = 5
BARS_MAX = 1_500
CORNERS_MAX = 50_000
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#999999")
EXTRA, BACKLOG = "#E69F00", "#222222"
STYLES = ("-", "--", ":", "-.")


def check_picture(file: Path) -> None:
    """Refuse a file that could not be written later: RequestError for its name, SetupError for folder or matplotlib."""
    if file.suffix.lower() not in KINDS:
        raise RequestError(f"--picture {file}: its name should end in {', '.join(KINDS)}")
    if not file.absolute().parent.is_dir():
        raise SetupError(f"--picture {file}: there is no folder {file.parent}")
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise not_installed(error, PICTURE) from error


def draw(found: Answer, file: Path) -> None:
    """Write the picture to the file, in the format of its suffix."""
    from matplotlib.figure import Figure

    below = bool(found.queues)
    figure = Figure(figsize=(10, 7.5 if below else 5), dpi=150, layout="constrained")
    panels = figure.subplots(2 if below else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _draw_load(found, panels[0])
    if below:
        _draw_backlog(found, panels[1])
    panels[-1].set_xlabel("UTC")
    figure.savefig(file)


def _draw_load(found: Answer, axes: Any) -> None:
    document = found.document
    unit = _unit(found)
    parts = _parts(found.load) if document.load.topics else {"waiting": found.load}
    styles = [{"color": COLOURS[index % len(COLOURS)]} for index in range(len(parts))]
    if found.extra is not None:
        parts["extra"] = found.extra
        styles.append({"color": EXTRA, "hatch": "//"})
    base: dict[int, int] = {}
    for (name, load), style in zip(parts.items(), styles, strict=True):
        curve = load.curve(unit)
        starts = curve.start_s.tolist()
        axes.bar(
            curve.start_s.astype("datetime64[s]"),
            curve.rows,
            np.timedelta64(UNIT_S[unit], "s"),
            bottom=[base.get(start, 0) for start in starts],
            align="edge",
            label=f"{name or '(none)'} ({load.total:,})",
            **style,
        )
        for start, rows in zip(starts, curve.rows.tolist(), strict=True):
            base[start] = base.get(start, 0) + rows
    highest = max(base.values(), default=0)
    if found.came is not None:
        highest = max(highest, _draw_came(found.came, unit, axes))
    axes.set_ylabel(f"Messages due, a {unit}")
    axes.set_title(f"{document.waiting + document.extra:,} messages, as of {show_version(document)}")
    if highest:
        axes.set_ylim(0, highest * 1.25)
        axes.legend(loc="upper right", ncols=3, frameon=False)


def _draw_came(came: Load, unit: Unit, axes: Any) -> int:
    """Draw the released messages as an outline over the bars, and return its height."""
    curve = came.curve(unit)
    if not len(curve.rows):
        return 0
    begin, end = curve.start_s, curve.start_s + UNIT_S[unit]
    nothing = np.zeros(len(begin), np.int64)
    corners = np.column_stack((begin, begin, end, end)).ravel().astype("datetime64[s]")
    heights = np.column_stack((nothing, curve.rows, curve.rows, nothing)).ravel()
    axes.plot(corners, heights, color=BACKLOG, linewidth=1.2, label=f"came ({came.total:,})")
    return int(curve.rows.max())


def _unit(found: Answer) -> Unit:
    """Choose the unit of the bars: the document's, or a coarser one if that gives more than BARS_MAX bars."""
    both = merge([found.load, *([] if found.extra is None else [found.extra])])
    unit = Unit(found.document.load.by)
    return unit if len(found.document.load.curve) <= BARS_MAX else both.curve(bars_max=BARS_MAX).unit


def _parts(load: Load) -> dict[str, Load]:
    """Split a load into its TOPICS_SHOWN largest topics and one part for all others."""
    topics = load.by_topic()
    shown = dict(list(topics.items())[:TOPICS_SHOWN])
    if len(topics) > len(shown):
        shown[f"{len(topics) - len(shown)} others"] = load.only(set(topics) - set(shown))
    return shown


def _draw_backlog(found: Answer, axes: Any) -> None:
    for index, (name, queue) in enumerate(found.queues.items()):
        seconds, rows = _thinned(*queue.backlog())
        axes.plot(
            (seconds * 1_000).astype("datetime64[ms]"),
            rows,
            color=BACKLOG if index == 0 else COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index % len(STYLES)],
            linewidth=1.4,
            label=f"{_whose(name, found)} at {queue.rate:,.10g} a second",
        )
    axes.set_ylabel("Messages that wait for consumers")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)


def _whose(name: str, found: Answer) -> str:
    if name != OTHER_TOPICS:
        return name
    return "all topics" if len(found.queues) == 1 else "the other topics"


def _thinned(seconds: FloatArray, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Reduce a curve to at most CORNERS_MAX corners, the highest of each run of neighbours, so no peak is lost."""
    step = -(-len(rows) // CORNERS_MAX)
    if step <= 1:
        return seconds, rows
    begins = np.arange(0, len(rows), step)
    return seconds[begins], np.maximum.reduceat(rows, begins)
