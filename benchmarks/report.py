"""Figures, and how they stand against a bar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LEAST_SHARE = 0.01  # of a row's CPU, of a stage that is shown
NO_TICK = "not divided: too short for the profile's timer"


@dataclass(frozen=True)
class Figure:
    """One measured value. `bar` is what the design asks for; `better` says on which side of it is good."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    better: Literal["higher", "lower"] = "higher"

    @property
    def ratio(self) -> float | None:
        """How many times better than the bar: 1 and above holds it."""
        if self.bar is None:
            return None
        if self.better == "higher":
            return self.value / self.bar
        return self.bar / self.value if self.value > 0 else float("inf")


@dataclass
class Spent:
    """What a row cost the server."""

    row: str
    cpu_s: float = 0.0
    ticks: dict[str, int] | None = None  # by stage, if the row is profiled


@dataclass
class Report:
    """The figures of one benchmark. `small` marks a run whose figures mean nothing."""

    name: str
    small: bool
    figures: list[Figure] = field(default_factory=list)
    stages: dict[str, list[Figure]] = field(default_factory=dict)  # of a row that was profiled

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        bar: float | None = None,
        better: Literal["higher", "lower"] = "higher",
    ) -> None:
        """Note one figure."""
        self.figures.append(Figure(name, float(value), unit, bar, better))

    def add_cost(self, spent: Spent, messages: int, bar_us: float | None = None) -> None:
        """Note the server's CPU a message; of a profiled row also that of each stage, the largest first."""
        each_us = spent.cpu_s / messages * 1e6
        self.add(f"{spent.row}: server CPU", each_us, "us/msg", bar_us, "lower")
        if spent.ticks is not None:
            ticks = spent.ticks or {NO_TICK: 1}
            counted = sum(ticks.values())
            self.stages[spent.row] = [
                Figure(stage, each_us * count / counted, "us/msg")
                for stage, count in sorted(ticks.items(), key=lambda item: -item[1])
            ]

    def value(self, name: str) -> float:
        """The figure of this name."""
        return next(figure.value for figure in self.figures if figure.name == name)

    def as_dict(self) -> dict[str, object]:
        """For --json: one document."""
        figures = [
            {"name": f.name, "value": f.value, "unit": f.unit, "bar": f.bar, "ratio": _finite(f.ratio)}
            for f in self.figures
        ]
        stages = {row: {f.name: f.value for f in found} for row, found in self.stages.items()}
        document = {"benchmark": self.name, "small": self.small, "figures": figures}
        return {**document, "stages": stages} if stages else document

    def lines(self) -> list[str]:
        """For people: name, value, and the bar where there is one."""
        title = f"{self.name}{'  (small: the figures mean nothing)' if self.small else ''}"
        width = max((len(figure.name) for figure in self.figures), default=0)
        lines = [title, *(f"  {figure.name:<{width}}  {_show(figure)}" for figure in self.figures)]
        for row, stages in self.stages.items():
            whole = sum(stage.value for stage in stages)
            lines.append(f"  server CPU of {row!r} by stage, of {whole:.1f} us/msg:")
            shown = [stage for stage in stages if stage.value >= whole * LEAST_SHARE]
            lines += [f"  {stage.value:8.2f}  {stage.value / whole:4.0%}  {stage.name}" for stage in shown]
            if rest := stages[len(shown) :]:
                left = sum(stage.value for stage in rest)
                lines.append(f"  {left:8.2f}  {left / whole:4.0%}  {len(rest)} more")
        return lines


@dataclass
class Comparison:
    """The same measures of several: a column each. A measure that makes no sense for one is left out of its report."""

    name: str
    small: bool
    columns: list[Report] = field(default_factory=list)

    def value(self, column: str, measure: str) -> float | None:
        """One cell."""
        report = next(report for report in self.columns if report.name == column)
        return next((figure.value for figure in report.figures if figure.name == measure), None)

    def measures(self) -> list[Figure]:
        """The rows: one figure for each name, in the order in which most columns have them."""
        rows: dict[str, Figure] = {}
        for report in sorted(self.columns, key=lambda report: -len(report.figures)):
            for figure in report.figures:
                rows.setdefault(figure.name, figure)
        return list(rows.values())

    def as_dict(self) -> dict[str, object]:
        """For --json: one document, a row for each that is compared."""
        rows = [{"name": report.name, "figures": report.as_dict()["figures"]} for report in self.columns]
        return {"benchmark": self.name, "small": self.small, "rows": rows}

    def lines(self) -> list[str]:
        """For people: one table. `!` marks a figure that misses its bar."""
        title = f"{self.name}{'  (small: the figures mean nothing)' if self.small else ''}"
        head = ["", *(report.name for report in self.columns), "bar"]
        table = [head, *(self._cells(figure) for figure in self.measures())]
        widths = [max(len(row[at]) for row in table) for at in range(len(head))]
        return [title, *("  ".join(_aligned(row, widths)).rstrip() for row in table)]

    def _cells(self, measure: Figure) -> list[str]:
        cells = [f"  {measure.name}, {measure.unit}"]
        for report in self.columns:
            own = next((figure for figure in report.figures if figure.name == measure.name), None)
            missed = own is not None and own.ratio is not None and own.ratio < 1
            cells.append("-" if own is None else brief(own.value) + ("!" if missed else ""))
        sign = ">=" if measure.better == "higher" else "<="
        return [*cells, "" if measure.bar is None else f"{sign} {measure.bar:,g}"]


def brief(value: float) -> str:
    """Three digits that mean something, or all of a whole number."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    first, *others = zip(row, widths)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def _show(figure: Figure) -> str:
    digits = 0 if abs(figure.value) >= 100 or figure.value == int(figure.value) else 2
    text = f"{figure.value:>14,.{digits}f} {figure.unit}"
    if figure.bar is None or figure.ratio is None:
        return text
    sign = ">=" if figure.better == "higher" else "<="
    verdict = "holds" if figure.ratio >= 1 else "MISSED"
    times = f", {figure.ratio:.2f} times" if figure.bar else ""
    return f"{text:<32} bar {sign} {figure.bar:,g}: {verdict}{times}"


def _finite(ratio: float | None) -> float | None:
    return None if ratio is None or ratio == float("inf") else ratio
