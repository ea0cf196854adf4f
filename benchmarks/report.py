"""Figures, and how they stand against a bar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
class Report:
    """The figures of one benchmark. `small` marks a run whose figures mean nothing."""

    name: str
    small: bool
    figures: list[Figure] = field(default_factory=list)

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

    def value(self, name: str) -> float:
        """The figure of this name."""
        return next(figure.value for figure in self.figures if figure.name == name)

    def as_dict(self) -> dict[str, object]:
        """For --json: one document."""
        figures = [
            {"name": f.name, "value": f.value, "unit": f.unit, "bar": f.bar, "ratio": _finite(f.ratio)}
            for f in self.figures
        ]
        return {"benchmark": self.name, "small": self.small, "figures": figures}

    def lines(self) -> list[str]:
        """For people: name, value, and the bar where there is one."""
        title = f"{self.name}{'  (small: the figures mean nothing)' if self.small else ''}"
        width = max((len(figure.name) for figure in self.figures), default=0)
        return [title, *(f"  {figure.name:<{width}}  {_show(figure)}" for figure in self.figures)]


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
