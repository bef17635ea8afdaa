from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, final

class Error(Exception):
    """What went wrong, in the one line that the command line says."""

@final
class Scenario:
    """A scenario, checked. It does not change; `set` gives another."""

    @staticmethod
    def load(path: str | PathLike[str]) -> Scenario:
        """Reads and checks a scenario file, with what it extends."""
    @staticmethod
    def parse(text: str, name: str = "text") -> Scenario:
        """A scenario from the text of a file that extends no other; `name` is for messages."""
    def set(self, settings: Mapping[str, Any]) -> Scenario:
        """The scenario with some of its keys set. Keys have dots, as in `demeter sweep`."""
    def to_dict(self) -> dict[str, Any]:
        """All keys, with defaults."""
    def to_toml(self) -> str:
        """The text of a scenario file."""
    @property
    def name(self) -> str: ...
    @property
    def systems(self) -> list[str]:
        """The systems that it compares."""

@final
class Stop:
    """Ends runs of other threads."""

    def __init__(self) -> None: ...
    def set(self) -> None:
        """Ends the runs that were given it."""

@final
class Sweep:
    """A grid of a scenario, under some systems, with some seeds."""

    def __init__(
        self,
        scenario: Scenario,
        grid: Mapping[str, Sequence[Any]],
        systems: Sequence[str],
        seeds: int,
    ) -> None: ...
    def runs(self) -> list[tuple[str, str, str, int]]:
        """All runs in order: its name for people, the scenario as TOML, the system, the seed."""
    def together(
        self, results: Sequence[str]
    ) -> tuple[str, str, list[tuple[str, list[Any]]]]:
        """What the runs' results, in order, give together: result file, CSV, columns."""

def simulate(
    scenario: Scenario,
    repeat: int,
    jobs: int | None,
    hours_max: float,
    progress: Callable[[str, float, tuple[int, int, float] | None], object] | None,
) -> str:
    """Runs a scenario on the simulator; the result file as JSON."""

def simulate_one(scenario: str, system: str, seed: int, stop: Stop) -> str:
    """Runs one system of a scenario (TOML) with one seed; its result as JSON."""

def table(json: str) -> str:
    """The table that the terminal shows."""

def page(json: str) -> str:
    """A self-contained page."""

def figures(json: str) -> list[tuple[str, list[Any]]]:
    """Every figure by its name, as columns with a row for each system of each case."""

def systems() -> list[dict[str, Any]]:
    """The systems that there are: name, what each is, its source, where it runs."""
