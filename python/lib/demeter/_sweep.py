"""Sweeps: a grid of a scenario, run on this machine's cores or on a cluster.

Runs and results are those of `demeter sweep`, in its order. An engine executes the runs, in any
order. Results can be kept in a folder, so that an interrupted sweep continues from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from os import PathLike
from pathlib import Path
from typing import Any

from demeter import _core
from demeter._result import Result, Table
from demeter._run import Progress, loaded

#: A run: its name for people, the scenario as TOML, the system, the seed.
_Run = tuple[str, str, str, int]

#: Maximum number of runs queued at Ray, so that it need not hold a large grid.
_WAITING_MAX = 1000


class SweepResult(Result):
    """A sweep's result: `runs` has a row for each run, the rest is of the median run."""

    def __init__(self, text: str, csv: str, columns: list[tuple[str, list[Any]]]) -> None:
        super().__init__(text)
        #: The table that `demeter sweep` writes.
        self.csv = csv
        #: The table as columns.
        self.runs = Table(columns)


def sweep(
    scenario: _core.Scenario | str | PathLike[str],
    grid: Mapping[str, Sequence[Any]],
    *,
    systems: Sequence[str] = (),
    seeds: int = 1,
    engine: str = "local",
    workers: int | None = None,
    retries: int = 3,
    keep: str | PathLike[str] | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> SweepResult:
    """Runs a scenario with every combination of some keys' values, on the simulator.

    `engine` is `local` (this process, `workers` runs at a time, by default one per core) or `ray`
    (the cluster that `ray.init` or RAY_ADDRESS names, else one on this machine with `workers`
    CPUs). Ray restarts a run whose worker died, up to `retries` times. `keep` is a folder for
    results: the same sweep with the same folder runs only the missing runs.
    """
    engines = {"local": _local, "ray": _ray}
    if engine not in engines:
        raise _core.Error(f"there is no engine {engine}; there are: {', '.join(engines)}")
    if seeds < 1 or retries < 0 or (workers is not None and workers < 1):
        raise _core.Error("seeds and workers are at least 1, retries at least 0")
    plan = _core.Sweep(loaded(scenario), grid, systems, seeds)
    runs = plan.runs()
    kept = _Kept(keep)
    results: dict[int, str] = {}
    for index, run in enumerate(runs):
        stored = kept.get(run)
        if stored is not None:
            results[index] = stored
    missing = [index for index in range(len(runs)) if index not in results]
    begun, before = time.monotonic(), len(results)
    for index, text in engines[engine](runs, missing, workers, retries):
        if index in results:
            raise _core.Error(f"{runs[index][0]} came back twice; please report it")
        kept.put(runs[index], text)
        results[index] = text
        if progress is not None:
            done = len(results)
            left_s = (time.monotonic() - begun) / (done - before) * (len(runs) - done)
            line = f"{done}/{len(runs)}  {runs[index][0]}"
            progress(Progress(line, 1.0, done, len(runs), left_s))
    return SweepResult(*plan.together([results[index] for index in range(len(runs))]))


class _Kept:
    """Results in a folder, one file each, named after everything that it depends on."""

    def __init__(self, folder: str | PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _core.Error(f"cannot keep results in {folder}: {error}") from None
        # Another version of the simulator may give other results.
        self._simulator = hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()

    def _path(self, run: _Run) -> Path | None:
        if self._folder is None:
            return None
        key = json.dumps([self._simulator, *run[1:]])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def get(self, run: _Run) -> str | None:
        path = self._path(run)
        if path is None:
            return None
        try:
            text = path.read_text(encoding="utf-8")
            json.loads(text)
        except (OSError, ValueError):
            return None
        return text

    def put(self, run: _Run, text: str) -> None:
        path = self._path(run)
        if path is None:
            return
        # Written atomically, even if this process is killed.
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as part:
            part.write(text)
        os.replace(part.name, path)


def _local(
    runs: list[_Run], missing: list[int], workers: int | None, _retries: int
) -> Iterator[tuple[int, str]]:
    """Runs in threads of this process; a run does not hold the interpreter's lock."""
    stop = _core.Stop()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        futures = {pool.submit(_core.simulate_one, *runs[i][1:], stop): i for i in missing}
        try:
            while futures:
                done, _ = wait(futures, timeout=0.1, return_when=FIRST_COMPLETED)
                for future in done:
                    index = futures.pop(future)
                    yield index, _named(runs[index], future.result)
        finally:
            stop.set()
            for future in futures:
                future.cancel()


def _ray(
    runs: list[_Run], missing: list[int], workers: int | None, retries: int
) -> Iterator[tuple[int, str]]:
    """Runs each run as a task of Ray, which restarts a task whose process or machine died."""
    try:
        import ray
    except ImportError:
        line = 'Ray is not installed: pip install ray, or use engine="local"'
        raise _core.Error(line) from None
    is_ours = not ray.is_initialized()
    if is_ours:
        # An existing cluster has its own number of CPUs.
        cpus = None if os.environ.get("RAY_ADDRESS") else workers
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    one = ray.remote(num_cpus=1, max_retries=retries)(_simulate_one)
    waiting: dict[Any, int] = {}
    left = list(reversed(missing))
    try:
        while left or waiting:
            while left and len(waiting) < _WAITING_MAX:
                index = left.pop()
                waiting[one.remote(*runs[index][1:])] = index
            for task in ray.wait(list(waiting), num_returns=1)[0]:
                index = waiting.pop(task)
                yield index, _named(runs[index], lambda: ray.get(task))
    except ray.exceptions.RayError as error:
        # The last line of a traceback has the error.
        last = str(error).strip().splitlines()[-1]
        raise _core.Error(f"Ray: {last}; what is done is kept where keep= says") from None
    finally:
        for task in waiting:
            ray.cancel(task, force=True)
        if is_ours:
            ray.shutdown()


def _simulate_one(scenario: str, system: str, seed: int) -> str:
    """Runs on a worker, which needs demeter installed."""
    from demeter import _core

    return _core.simulate_one(scenario, system, seed, _core.Stop())


def _named(run: _Run, result: Callable[[], str]) -> str:
    """The result of a run, or its error with the run's name."""
    try:
        return result()
    except _core.Error as error:
        cause = getattr(error, "cause", None) or error
        raise _core.Error(f"{run[0]}: {cause}") from None
