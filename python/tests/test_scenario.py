"""Scenarios are read, changed and refused as on the command line."""

import pickle
import subprocess
from pathlib import Path

import demeter
import pytest
from conftest import SCENARIOS


def test_a_scenario_changes_by_keys_with_dots() -> None:
    gups = demeter.Scenario.load(SCENARIOS / "gups.toml")
    other = gups.set({"workload.hot_mib": 50, "systems": ["none"], "machine.thp": "never"})
    assert other.to_dict()["workload"]["hot_mib"] == 50
    assert (other.systems, other.to_dict()["machine"]["thp"]) == (["none"], "never")
    # The first scenario is unchanged.
    assert gups.to_dict()["workload"]["hot_mib"] == 100


def test_text_and_pickle_keep_all_of_it(quick: demeter.Scenario) -> None:
    for copy in (demeter.Scenario.parse(quick.to_toml()), pickle.loads(pickle.dumps(quick))):
        assert copy.to_dict() == quick.to_dict()


@pytest.mark.parametrize("key", ["workload.hot", "agent.epoch_ms", "name.x", "seeed"])
def test_what_is_refused_is_said_as_the_command_says_it(command: Path, key: str) -> None:
    path, value = SCENARIOS / "gups.toml", 1
    scenario = demeter.Scenario.load(path)
    with pytest.raises(demeter.Error) as ours:
        scenario.set({key: value})
    theirs = subprocess.run(
        [command, "sweep", path, "--set", f"{key}={value}"], capture_output=True, text=True
    )
    assert theirs.stderr == f"error: {ours.value}\n"


def test_a_misspelt_key_in_a_file_is_said_as_the_command_says_it(
    command: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'extends = "{SCENARIOS}/gups.toml"\nsistems = ["none"]\n')
    with pytest.raises(demeter.Error) as ours:
        demeter.Scenario.load(path)
    theirs = subprocess.run([command, "run", path], capture_output=True, text=True)
    assert theirs.stderr == f"error: {ours.value}\n"
    assert "sistems" in str(ours.value)


def test_what_no_scenario_has_is_refused(quick: demeter.Scenario) -> None:
    with pytest.raises(TypeError, match="not object"):
        quick.set({"seed": object()})
    deep: list[object] = []
    deep.append(deep)
    with pytest.raises(TypeError):
        quick.set({"systems": deep})
