"""Results of runs, as text, columns and data frames."""

from __future__ import annotations

import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demeter import _core

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

# Arrow's largest integer.
_INTEGER_MAX = 2**63 - 1


class Table:
    """A table: named columns with a value or `None` for each row."""

    def __init__(self, columns: Iterable[tuple[str, list[Any]]]) -> None:
        self.columns: dict[str, list[Any]] = {
            name: _numbers(values) for name, values in columns
        }

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        try:
            return self.columns[name]
        except KeyError:
            names = ", ".join(self.columns)
            raise _core.Error(f"there is no column {name}; there are: {names}") from None

    def __repr__(self) -> str:
        return f"<demeter.Table {len(self)} rows, {len(self.columns)} columns>"

    @property
    def settings(self) -> list[str]:
        """The columns before `system`, which distinguish rows of the same system."""
        names = list(self.columns)
        return names[: names.index("system")] if "system" in names else []

    def rows(self) -> list[dict[str, Any]]:
        """Each row as a dictionary."""
        names = list(self.columns)
        return [dict(zip(names, row)) for row in zip(*self.columns.values())]

    def to_arrow(self) -> pyarrow.Table:
        """As a table of Arrow."""
        return _needed("pyarrow").table(self.columns)

    def to_pandas(self) -> pandas.DataFrame:
        """As a data frame of pandas."""
        return _needed("pandas").DataFrame(self.columns)  # type: ignore[no-any-return]

    def to_polars(self) -> polars.DataFrame:
        """As a data frame of polars."""
        return _needed("polars").DataFrame(self.columns, strict=False)


class Result:
    """A run's result: the result file that `demeter run --json` writes."""

    def __init__(self, text: str) -> None:
        self._table = _core.table(text)
        self.text = text
        #: The whole result, as dictionaries and lists.
        self.data: dict[str, Any] = json.loads(text)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Result:
        """Reads and checks a result file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _core.Error(f"cannot read result file {path}: {error}") from error
        return cls(text)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a result file, for `demeter report` and `demeter compare`."""
        pretty = json.dumps(self.data, indent=2, ensure_ascii=False)
        Path(path).write_text(pretty + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return self._table

    def html(self) -> str:
        """The page that `demeter report --html` writes."""
        return _core.page(self.text)

    @property
    def figures(self) -> Table:
        """Every figure by its name: a row for each system of each case."""
        return Table(_core.figures(self.text))

    @property
    def series(self) -> Table:
        """The runs over time: a row for each interval of each system of each case."""
        rows: list[dict[str, Any]] = []
        cases = self.data.get("cases", [])
        whole = {"settings": [], "systems": self.data["systems"]}
        for case in [*cases, whole]:
            for system in case["systems"]:
                start = dict(case["settings"]) | {"system": system["name"]}
                rows.extend(start | point for point in system["series"])
        names = list(dict.fromkeys(name for row in rows for name in row))
        return Table((name, [row.get(name) for row in rows]) for name in names)


def _numbers(values: list[Any]) -> list[Any]:
    """Converts texts to numbers if all are; integers beyond Arrow's range become floats."""
    if values and all(isinstance(value, str) for value in values):
        for kind in (int, float):
            try:
                return [kind(value) for value in values]
            except ValueError:
                continue
    if any(isinstance(value, int) and value > _INTEGER_MAX for value in values):
        return [None if value is None else float(value) for value in values]
    return values


def _needed(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError:
        line = f"{library} is not installed: pip install {library}"
        raise _core.Error(line) from None
