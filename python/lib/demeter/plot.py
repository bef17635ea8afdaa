"""Plots of results, by matplotlib. Each takes axes to draw on, or makes some, and returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from demeter import _core
from demeter._result import Result, Table, _needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def over_time(result: Result, figure: str = "speed", ax: Axes | None = None) -> Axes:
    """A figure of each interval over time: `speed`, `hot_in_fast` or `fast_bytes`."""
    ax = ax or _axes()
    series = result.series
    if not len(series):
        raise _core.Error("the result has no series")
    series[figure]
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in series.rows():
        times, values = lines.setdefault(_label(series, row), ([], []))
        if row[figure] is not None:
            times.append(row["t_s"])
            values.append(row[figure])
    for label, (times, values) in lines.items():
        ax.plot(times, values, label=label)
    ax.set(xlabel="s", ylabel=figure.replace("_", " "), title=result.data["scenario"])
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax


def heat(
    table: Table, x: str, y: str, figure: str, system: str | None = None, ax: Axes | None = None
) -> Axes:
    """A heat map: the mean of a figure at each pair of values of two columns."""
    ax = ax or _axes()
    cells: dict[tuple[Any, Any], list[float]] = {}
    for row, at_x, at_y, value in zip(table.rows(), table[x], table[y], table[figure]):
        is_wanted = system is None or row["system"] == system
        if is_wanted and value is not None and at_x not in (None, "") and at_y not in (None, ""):
            cells.setdefault((_number(at_x), _number(at_y)), []).append(value)
    if not cells:
        raise _core.Error(f"no row has {x}, {y} and {figure}")
    xs, ys = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    mean = {cell: sum(values) / len(values) for cell, values in cells.items()}
    nothing = float("nan")
    image = ax.imshow(
        [[mean.get((at_x, at_y), nothing) for at_x in xs] for at_y in ys], aspect="auto"
    )
    ax.set_xticks(range(len(xs)), [str(value) for value in xs])
    ax.set_yticks(range(len(ys)), [str(value) for value in ys])
    title = figure if system is None else f"{figure} of {system}"
    ax.set(xlabel=x, ylabel=y, title=title)
    if ax.figure is not None:
        ax.figure.colorbar(image, ax=ax)
    return ax


def flushes(result: Result, ax: Axes | None = None) -> Axes:
    """Invalidations of translations by kind, a bar for each system."""
    ax = ax or _axes()
    figures = result.figures
    prefix = "counters.flush_"
    kinds = [n for n in figures.columns if n.startswith(prefix) and n != f"{prefix}total"]
    if not kinds:
        raise _core.Error("the result counts no flushes")
    labels = [_label(figures, row) for row in figures.rows()]
    below = [0.0] * len(labels)
    for kind in kinds:
        heights = [value or 0 for value in figures[kind]]
        ax.bar(labels, heights, bottom=below, label=kind.removeprefix(prefix).replace("_", " "))
        below = [low + height for low, height in zip(below, heights)]
    ax.set(ylabel="TLB flushes", title=result.data["scenario"])
    ax.legend()
    return ax


def _label(table: Table, row: dict[str, Any]) -> str:
    """A label that distinguishes a row from the others."""
    settings = (f"{name}={row[name]}" for name in table.settings if row[name] not in (None, ""))
    return " ".join([*settings, str(row["system"])])


def _number(value: Any) -> Any:
    try:
        return float(value) if "." in str(value) else int(value)
    except ValueError:
        return value


def _axes() -> Axes:
    _, ax = _needed("matplotlib.pyplot").subplots()
    return ax  # type: ignore[no-any-return]
