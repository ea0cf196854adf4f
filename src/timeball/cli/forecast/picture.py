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
TOPICS_DRAWN = 5
BARS_DRAWN_MAX = 1_500
CORNERS_MAX = 50_000
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#999999")
EXTRA, BACKLOG = "#E69F00", "#222222"
STYLES = ("-", "--", ":", "-.")


def check_picture(file: Path) -> None:
    """Check that the picture can be written. RequestError for a bad suffix, SetupError without folder or matplotlib."""
    if file.suffix.lower() not in KINDS:
        raise RequestError(f"--picture {file}: its name should end in {', '.join(KINDS)}")
    if not file.absolute().parent.is_dir():
        raise SetupError(f"--picture {file}: there is no folder {file.parent}")
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise not_installed(error, PICTURE) from error


def draw(answer: Answer, file: Path) -> None:
    """Write the picture to the file, in the format of its suffix."""
    from matplotlib.figure import Figure

    has_backlog = bool(answer.queues)
    figure = Figure(figsize=(10, 7.5 if has_backlog else 5), dpi=150, layout="constrained")
    panels = figure.subplots(2 if has_backlog else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _draw_load(answer, panels[0])
    if has_backlog:
        _draw_backlog(answer, panels[1])
    panels[-1].set_xlabel("UTC")
    figure.savefig(file)


def _draw_load(answer: Answer, axes: Any) -> None:
    document = answer.document
    unit = _unit(answer)
    loads = _largest_topics(answer.load) if document.load.topics else {"waiting": answer.load}
    styles = [{"color": COLOURS[index % len(COLOURS)]} for index in range(len(loads))]
    if answer.extra is not None:
        loads["extra"] = answer.extra
        styles.append({"color": EXTRA, "hatch": "//"})
    heights: dict[int, int] = {}
    for (name, load), style in zip(loads.items(), styles, strict=True):
        curve = load.curve(unit)
        starts = curve.start_s.tolist()
        axes.bar(
            curve.start_s.astype("datetime64[s]"),
            curve.rows,
            np.timedelta64(UNIT_S[unit], "s"),
            bottom=[heights.get(start, 0) for start in starts],
            align="edge",
            label=f"{name or '(none)'} ({load.total:,})",
            **style,
        )
        for start, rows in zip(starts, curve.rows.tolist(), strict=True):
            heights[start] = heights.get(start, 0) + rows
    highest = max(heights.values(), default=0)
    if answer.came is not None:
        highest = max(highest, _draw_released(answer.came, unit, axes))
    axes.set_ylabel(f"Messages due, a {unit}")
    axes.set_title(f"{document.waiting + document.extra:,} messages, as of {show_version(document)}")
    if highest:
        axes.set_ylim(0, highest * 1.25)
        axes.legend(loc="upper right", ncols=3, frameon=False)


def _draw_released(released: Load, unit: Unit, axes: Any) -> int:
    """Draw the released messages as an outline over the bars. Returns the height of the outline."""
    curve = released.curve(unit)
    if not len(curve.rows):
        return 0
    begin, end = curve.start_s, curve.start_s + UNIT_S[unit]
    zeros = np.zeros(len(begin), np.int64)
    corners = np.column_stack((begin, begin, end, end)).ravel().astype("datetime64[s]")
    heights = np.column_stack((zeros, curve.rows, curve.rows, zeros)).ravel()
    axes.plot(corners, heights, color=BACKLOG, linewidth=1.2, label=f"came ({released.total:,})")
    return int(curve.rows.max())


def _unit(answer: Answer) -> Unit:
    """Choose the unit of the bars: the document's, or a coarser one if that gives more than BARS_DRAWN_MAX bars."""
    total = merge([answer.load, *([] if answer.extra is None else [answer.extra])])
    unit = Unit(answer.document.load.by)
    return unit if len(answer.document.load.curve) <= BARS_DRAWN_MAX else total.curve(bars_max=BARS_DRAWN_MAX).unit


def _largest_topics(load: Load) -> dict[str, Load]:
    """Split a load by topic: the TOPICS_DRAWN largest topics, and one entry for all others."""
    topics = load.by_topic()
    shown = dict(list(topics.items())[:TOPICS_DRAWN])
    if len(topics) > len(shown):
        shown[f"{len(topics) - len(shown)} others"] = load.only(set(topics) - set(shown))
    return shown


def _draw_backlog(answer: Answer, axes: Any) -> None:
    for index, (name, queue) in enumerate(answer.queues.items()):
        seconds, rows = _thin_out(*queue.backlog())
        axes.plot(
            (seconds * 1_000).astype("datetime64[ms]"),
            rows,
            color=BACKLOG if index == 0 else COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index % len(STYLES)],
            linewidth=1.4,
            label=f"{_consumers_label(name, answer)} at {queue.rate:,.10g} a second",
        )
    axes.set_ylabel("Messages that wait for consumers")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)


def _consumers_label(name: str, answer: Answer) -> str:
    if name != OTHER_TOPICS:
        return name
    return "all topics" if len(answer.queues) == 1 else "the other topics"


def _thin_out(seconds: FloatArray, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Reduce a curve to at most CORNERS_MAX points: the highest of each run of neighbours, so no peak is lost."""
    step = -(-len(rows) // CORNERS_MAX)
    if step <= 1:
        return seconds, rows
    begins = np.arange(0, len(rows), step)
    return seconds[begins], np.maximum.reduceat(rows, begins)
