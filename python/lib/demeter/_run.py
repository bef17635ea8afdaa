"""Runs scenarios: on the simulator in this process, elsewhere by the command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from demeter import _core
from demeter._result import Result

#: Time limit for an interrupted command to end its VMs, seconds.
_END_S = 60


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    #: A description for people.
    text: str
    #: Share of this run that is done, 0 to 1; None if unknown.
    share: float | None = None
    #: Number of finished runs, when one has ended.
    done: int | None = None
    #: Number of all runs.
    of: int | None = None
    #: Estimated time for the remaining runs, seconds.
    left_s: float | None = None


def run(
    scenario: _core.Scenario | str | PathLike[str],
    *,
    on: str = "sim",
    systems: Sequence[str] | None = None,
    seed: int | None = None,
    duration_s: int | None = None,
    repeat: int = 1,
    jobs: int | None = None,
    hours_max: float = 8.0,
    progress: Callable[[Progress], object] | None = None,
    binary: str | PathLike[str] | None = None,
) -> Result:
    """Runs a scenario under its systems, or under the given ones.

    `on` is `sim` (in this process; `jobs` runs at a time, by default one per core), `lab` (real
    VMs) or `here` (this machine's own tiers, as root). The last two need the command `demeter`:
    `binary`, else the environment's DEMETER, else the first in the path.
    """
    scenario = loaded(scenario)
    if on not in ("sim", "lab", "here"):
        raise _core.Error(f"there is no place {on}; there are: sim, lab, here")
    chosen: dict[str, Any] = {}
    if systems is not None:
        chosen["systems"] = list(systems)
    if seed is not None:
        chosen["seed"] = seed
    if duration_s is not None:
        chosen["duration_s"] = duration_s
    scenario = scenario.set(chosen)
    if repeat < 1 or (jobs is not None and jobs < 1):
        raise _core.Error("repeat and jobs are at least 1")
    if on != "sim":
        return _by_command(scenario, on, repeat, progress, binary)

    def told(name: str, share: float, all: tuple[int, int, float] | None) -> None:
        assert progress is not None
        if all is None:
            progress(Progress(f"{name}: {share:.0%}", share))
        else:
            done, of, left_s = all
            progress(Progress(f"{done}/{of}  {name}", share, done, of, left_s))

    heard = told if progress is not None else None
    return Result(_core.simulate(scenario, repeat, jobs, hours_max, heard))


def loaded(scenario: _core.Scenario | str | PathLike[str]) -> _core.Scenario:
    """The scenario, loaded if it is a file name."""
    if isinstance(scenario, _core.Scenario):
        return scenario
    return _core.Scenario.load(scenario)


def _by_command(
    scenario: _core.Scenario,
    on: str,
    repeat: int,
    progress: Callable[[Progress], object] | None,
    binary: str | PathLike[str] | None,
) -> Result:
    command = binary or os.environ.get("DEMETER") or shutil.which("demeter")
    if command is None:
        raise _core.Error(
            f"running on {on} needs the command demeter: put it into the path, or name it with "
            "binary= or the environment's DEMETER"
        )
    with tempfile.TemporaryDirectory(prefix="demeter-") as folder:
        file, result = Path(folder, f"{scenario.name}.toml"), Path(folder, "result.json")
        file.write_text(scenario.to_toml(), encoding="utf-8")
        line = [os.fspath(command), "run", os.fspath(file), "--on", on, "--json", os.fspath(result)]
        line += ["--repeat", str(repeat)] if repeat > 1 else []
        try:
            child = subprocess.Popen(
                line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        except OSError as error:
            raise _core.Error(f"cannot run {command}: {error}") from None
        last = _listen(child, progress)
        if child.returncode != 0:
            said = last.removeprefix("error: ") or f"it ended with {child.returncode}"
            raise _core.Error(said)
        return Result.load(result)


def _listen(
    child: subprocess.Popen[str], progress: Callable[[Progress], object] | None
) -> str:
    """Passes on a command's output until it ends. Returns its last line."""
    last = ""
    try:
        assert child.stderr is not None
        for line in child.stderr:
            last = line.rstrip() or last
            if progress is not None:
                progress(Progress(last))
        child.wait()
    except BaseException:
        # The command ends its VMs and cleans up.
        child.send_signal(signal.SIGINT)
        try:
            child.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    return last
