"""Runs on the simulator, and by the command; results as columns and pictures."""

import json
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import demeter
import pytest


def test_a_run_is_that_of_the_command(
    quick: demeter.Scenario, command: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "ci.toml", tmp_path / "out.json"
    file.write_text(quick.to_toml())
    subprocess.run([command, "run", file, "--on", "sim", "--json", out], check=True)
    ours, theirs = demeter.run(quick), demeter.Result.load(out)
    assert ours.data == theirs.data
    ours.save(tmp_path / "ours.json")
    assert demeter.Result.load(tmp_path / "ours.json").data == theirs.data


def test_others_run_meanwhile_and_progress_is_told(quick: demeter.Scenario) -> None:
    told: list[demeter.Progress] = []
    beats, over = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not over.is_set():
            beats += 1

    other = threading.Thread(target=beat)
    other.start()
    try:
        demeter.run(quick, jobs=1, progress=told.append)
    finally:
        over.set()
        other.join()
    ends = [(p.done, p.of) for p in told if p.done is not None]
    assert ends == [(1, 2), (2, 2)]
    assert any(p.share is not None and p.share < 1.0 for p in told)
    assert beats > 1000


def test_what_progress_raises_ends_the_run(quick: demeter.Scenario) -> None:
    def enough(_: demeter.Progress) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        demeter.run(quick, progress=enough)


def test_figures_and_series_are_columns(quick: demeter.Scenario) -> None:
    result = demeter.run(quick)
    assert result.figures["system"] == ["none", "demeter"]
    speeds = [system["speed"]["mean"] for system in result.data["systems"]]
    assert result.figures["mean_mops"] == speeds
    assert len(result.series) == 2 * 4
    with pytest.raises(demeter.Error, match="there is no column speed; there are: "):
        result.figures["speed"]
    assert "demeter" in str(result) and result.html().startswith("<!doctype html>")


@pytest.mark.parametrize("library", ["pyarrow", "pandas", "polars"])
def test_tables_are_data_frames(quick: demeter.Scenario, library: str) -> None:
    pytest.importorskip(library)
    table = demeter.run(quick, systems=["none", "demeter"]).figures
    if library == "pyarrow":
        found = table.to_arrow().column("mean_mops").to_pylist()
    elif library == "pandas":
        found = list(table.to_pandas()["mean_mops"])
    else:
        found = table.to_polars()["mean_mops"].to_list()
    assert found == table["mean_mops"]


def test_pictures_show_what_the_columns_say(quick: demeter.Scenario) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from demeter import plot

    result = demeter.run(quick)
    lines: Any = plot.over_time(result, "hot_in_fast").get_lines()
    assert [line.get_label() for line in lines] == ["none", "demeter"]
    assert list(lines[1].get_ydata())[-1] == result.data["systems"][1]["hot_in_fast_final"]
    bars: Any = plot.flushes(result).patches
    total = sum(result.figures["counters.flush_total"])
    assert sum(bar.get_height() for bar in bars) == total


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_lab_is_run_by_the_command(quick: demeter.Scenario, tmp_path: Path) -> None:
    result = {"schema": 2, "scenario": "x", "on": "lab", "seed": 1, "duration_s": 1, "systems": []}
    # A fake command that records its arguments and writes the result.
    fake = _script(
        tmp_path / "demeter",
        f"echo \"$*\" >&2\nwhile [ \"$1\" != --json ]; do shift; done\necho '{json.dumps(result)}' > \"$2\"",
    )
    told: list[demeter.Progress] = []
    got = demeter.run(quick, on="lab", repeat=3, binary=fake, progress=told.append)
    assert got.data == result
    assert "ci.toml --on lab" in told[0].text and told[0].text.endswith("--repeat 3")


def test_what_the_command_says_is_the_error(quick: demeter.Scenario, tmp_path: Path) -> None:
    fake = _script(tmp_path / "demeter", "echo 'error: no QEMU here' >&2; exit 1")
    with pytest.raises(demeter.Error, match="^no QEMU here$"):
        demeter.run(quick, on="lab", binary=fake)


def test_a_missing_command_is_one_line(
    quick: demeter.Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEMETER", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(demeter.Error, match="needs the command demeter"):
        demeter.run(quick, on="here")
