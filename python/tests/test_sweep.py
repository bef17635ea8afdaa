"""Sweeps give what `demeter sweep` gives, whoever runs them and however often they begin."""

import builtins
import json
import subprocess
from pathlib import Path
from typing import Any

import demeter
import pytest

GRID = {"workload.hot_mib": [20, 40], "machine.slow.latency_ns": [150, 300]}


def test_a_sweep_is_that_of_the_command(
    quick: demeter.Scenario, command: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ci.toml"
    file.write_text(quick.to_toml())
    axes = [f"--set={key}={','.join(map(str, values))}" for key, values in GRID.items()]
    outputs = [f"--csv={tmp_path}/out.csv", f"--json={tmp_path}/out.json"]
    subprocess.run([command, "sweep", file, *axes, *outputs, "--seeds=2"], check=True)
    ours = demeter.sweep(file, GRID, seeds=2)
    assert ours.csv == (tmp_path / "out.csv").read_text()
    assert ours.data == json.loads((tmp_path / "out.json").read_text())
    assert len(ours.runs) == 2 * 2 * 2 * 2
    assert ours.runs["workload.hot_mib"][:9] == [20] * 8 + [40]


def test_an_interrupted_sweep_goes_on_from_what_is_done(
    quick: demeter.Scenario, tmp_path: Path
) -> None:
    def enough(progress: demeter.Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demeter.sweep(quick, GRID, workers=1, keep=tmp_path, progress=enough)
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 3
    # An incomplete file is ignored.
    files[0].write_text(files[0].read_text()[:100])
    told: list[demeter.Progress] = []
    whole = demeter.sweep(quick, GRID, keep=tmp_path, progress=told.append)
    assert len(told) == 8 - 2
    assert whole.csv == demeter.sweep(quick, GRID).csv
    # Another seed makes another run.
    other = quick.set({"seed": 9})
    assert demeter.sweep(other, {}, systems=["none"], keep=tmp_path).data["seed"] == 9


def test_what_is_wrong_is_said_before_anything_runs(quick: demeter.Scenario) -> None:
    for grid, says in [
        ({"workload.hot": [1]}, "workload.hot is no key of this table"),
        ({"workload.hot_mib": 20}, "workload.hot_mib: give a list"),
        ({"workload.hot_mib": []}, "workload.hot_mib: give a list"),
    ]:
        with pytest.raises(demeter.Error, match=says):
            demeter.sweep(quick, grid)  # type: ignore[arg-type]
    with pytest.raises(demeter.Error, match="there is no engine rey; there are: local, ray"):
        demeter.sweep(quick, GRID, engine="rey")


def test_a_run_that_fails_is_named(quick: demeter.Scenario) -> None:
    with pytest.raises(demeter.Error, match="^workload.hot_mib=20 flat-mode: .*a line of fast memory"):
        demeter.sweep(quick, {"workload.hot_mib": [20]}, systems=["flat-mode"])


def test_without_ray_there_is_one_line(
    quick: demeter.Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(demeter.Error, match="^Ray is not installed: pip install ray, or use engine"):
        demeter.sweep(quick, GRID, engine="ray")


@pytest.fixture
def two_workers() -> Any:
    """A cluster of Ray on this machine: a head without CPUs, and two nodes of one."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def test_a_worker_that_is_killed_costs_no_run(
    quick: demeter.Scenario, two_workers: Any
) -> None:
    cluster, nodes = two_workers
    told: list[demeter.Progress] = []

    def kill_one(progress: demeter.Progress) -> None:
        told.append(progress)
        if progress.done == 2:
            cluster.remove_node(nodes[0], allow_graceful=False)

    # Long enough that both workers are busy when one is killed.
    longer = quick.set({"duration_s": 20, "sim.scale_bits": 4})
    swept = demeter.sweep(longer, GRID, seeds=2, engine="ray", progress=kill_one)
    assert [p.done for p in told] == list(range(1, 17))
    assert len({p.text.split("  ")[1] for p in told}) == 16
    local = demeter.sweep(longer, GRID, seeds=2)
    assert (swept.csv, swept.data) == (local.csv, local.data)
