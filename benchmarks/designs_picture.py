"""From the figures of `designs` to docs/designs.md: the table in the page, and the picture beside it.

    timeball bench designs --json > figures.json
    python -m benchmarks.designs_picture figures.json

The picture is drawn without a display, and only where matplotlib is installed (extras picture, dev). One panel a
measure, one bar a strategy, always in the same colour and order; what a strategy cannot do has no bar.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.designs_lives import DELAYS_MS
from benchmarks.report import brief

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"
COLOURS = ["#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73"]  # told apart by the colour-blind
SHADES = [1.0, 0.45, 0.2]
SOLID = "#555555"  # of a legend that is about shades only

Document = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Measures that are stacked in one bar, and what each part is called."""

    title: str
    unit: str
    parts: tuple[tuple[str, str], ...]
    scale: float = 1.0


PANELS = [
    Panel("Admitted in a second\nhigher is better", "thousand", (("admit: rate", ""),), 1e-3),
    Panel(
        "A million overdue: released in a second\nhigher is better",
        "thousand",
        (("overdue: rate", ""),),
        1e-3,
    ),
    Panel(
        "A million due in one second:\non disk so long after the last instant",
        "s",
        (("burst: all on disk, from the last instant", ""),),
    ),
    Panel("10,000 a second at random milliseconds:\nlateness, p99", "ms", (("steady: lateness p99", ""),)),
    Panel(
        "Server CPU for a scheduled message",
        "us",
        (
            ("admit: server CPU", "admitted"),
            ("to the table: server CPU", "to the table"),
            ("burst: server CPU", "released"),
        ),
    ),
    Panel("RAM for a scheduled message that waits", "bytes", (("waiting: RAM", ""),)),
    Panel(
        "Disk for a scheduled message that waits",
        "bytes",
        (
            ("waiting: disk, its own files", "own files"),
            ("waiting: disk, the log that must stay", "the log, which must stay"),
        ),
    ),
    Panel(
        "kill -9, a million waiting and saved:\nfirst release on time",
        "s",
        (("restart, all saved: first release on time", ""),),
    ),
]
SAID = (
    "The same work for each design of waiting. "
    "The longer bar is the better one in the first two panels, and the worse one in all others."
)
PICTURE = "![Nine measures of the five columns below, a panel each](pictures/designs.png)\n"
LIVES_TITLE = "Written for each byte of a message\nthat waits so long (logarithmic)"


# Measures that are left out of the page's table. `timeball bench designs --json` has all of them.
NOT_IN_TABLE = (
    "burst: all on disk, from the second's begin",
    "burst: server CPU",
    "early",  # the benchmark fails if there is one
    "missing or doubled",
    "overdue: all on disk, from the start",
    "overdue: server CPU since its start",
    "restart, all saved: server CPU until seen",
    "restart, nothing saved yet",
    "steady: lateness max",
    "steady: server CPU",
    "to the table: server CPU",
    "waiting: disk, its own files at first",
    "written, waiting 10 s",
    "moved in the log, waiting",
    "kept once",
)


def figures_of(document: Document) -> dict[str, dict[str, float]]:
    """Name of a strategy -> name of a measure -> value."""
    return {row["name"]: {f["name"]: f["value"] for f in row["figures"]} for row in document["rows"]}


def markdown(document: Document) -> str:
    """Build the table: strategies as columns, measures as rows."""
    found = figures_of(document)
    fullest = max(document["rows"], key=lambda row: len(row["figures"]))
    names = [(figure["name"], figure["unit"], figure["bar"]) for figure in fullest["figures"]]
    for row in document["rows"]:
        known = {name for name, _, _ in names}
        names += [(f["name"], f["unit"], f["bar"]) for f in row["figures"] if f["name"] not in known]
    lines = [
        "| | " + " | ".join(f"`{name}`" for name in found) + " |",
        "|---|" + "---:|" * len(found),
    ]
    for name, unit, _ in names:
        if name.startswith(NOT_IN_TABLE):
            continue
        cells = [brief(figures[name]) if name in figures else "–" for figures in found.values()]
        lines.append(f"| {name}, {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def into_page(page: str, figures: str) -> str:
    """The page with this between its marks; ValueError when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN.strip()} … {END.strip()} in the page")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def draw(document: Document, file: Path) -> None:
    """Write the picture; needs matplotlib."""
    from matplotlib.figure import Figure

    found = figures_of(document)
    figure = Figure(figsize=(13, 11), dpi=110, layout="constrained")
    grid = figure.subplots(3, 3).flat
    for axes, panel in zip(grid, PANELS):
        _bars(axes, panel, found)
    _lives(figure.axes[-1], found)
    figure.suptitle(SAID, fontsize=11)
    figure.savefig(file)


def _bars(axes: Any, panel: Panel, found: dict[str, dict[str, float]]) -> None:
    """Horizontal bars, the first strategy on top, with their sums written beside them."""
    sums = []
    for at, figures in enumerate(found.values()):
        left = 0.0
        for (measure, _), shade in zip(panel.parts, SHADES):
            # Memory may shrink while messages come; a bar to the left would say nothing.
            value = max(0.0, figures.get(measure, 0.0) * panel.scale)
            axes.barh(at, value, left=left, color=COLOURS[at % len(COLOURS)], alpha=shade, height=0.7)
            left += value
        known = any(measure in figures for measure, _ in panel.parts)
        sums.append(left)
        axes.text(left, at, f" {brief(left)}" if known else " –", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), list(found), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*sums, 1e-9]) * 1.22)
    axes.set_xlabel(panel.unit, fontsize=9)
    _plain(axes, panel.title)
    if len(panel.parts) > 1:
        from matplotlib.patches import Patch

        axes.set_xlabel("")
        axes.set_title(f"{panel.title}, {panel.unit}", fontsize=10, loc="left")
        shown = [Patch(color=SOLID, alpha=shade, label=part) for (_, part), shade in zip(panel.parts, SHADES)]
        axes.legend(
            handles=shown,
            fontsize=8,
            frameon=False,
            ncols=3,
            loc="upper center",
            bbox_to_anchor=(0.45, -0.13),
        )


def _lives(axes: Any, found: dict[str, dict[str, float]]) -> None:
    """Groups of bars, one a delay."""
    width = 0.8 / len(found)
    for at, figures in enumerate(found.values()):
        for group, delay in enumerate(DELAYS_MS):
            value = figures.get(f"written, waiting {delay}")
            if value is None:
                continue
            x = group + (at - (len(found) - 1) / 2) * width
            axes.bar(x, value, width * 0.92, color=COLOURS[at % len(COLOURS)])
            axes.text(x, value * 1.06, brief(value), ha="center", va="bottom", fontsize=7, rotation=90)
    axes.set_yscale("log")
    axes.set_ylim(1, axes.get_ylim()[1] * 3)
    axes.set_xticks(range(len(DELAYS_MS)), list(DELAYS_MS))
    axes.set_ylabel("bytes on disk for a byte", fontsize=9)
    _plain(axes, LIVES_TITLE)


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def main(arguments: list[str]) -> None:
    """Bring figures into docs/."""
    (name,) = arguments
    document = json.loads(Path(name).read_text("utf-8"))
    if document["small"]:
        raise SystemExit(f"{name} is of --size small: its figures mean nothing")
    page = DOCS / "designs.md"
    text = page.read_text("utf-8")
    if find_spec("matplotlib") is None:
        page.write_text(into_page(text, markdown(document)), "utf-8")
        raise SystemExit("the table is written; no matplotlib for the picture: `make setup` installs it")
    draw(document, DOCS / "pictures" / "designs.png")
    page.write_text(into_page(text, f"{PICTURE}\n{markdown(document)}"), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
