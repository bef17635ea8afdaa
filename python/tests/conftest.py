"""What tests share: a scenario that takes no time, and the command."""

import os
import shutil
from pathlib import Path

import demeter
import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"


@pytest.fixture
def quick() -> demeter.Scenario:
    """The smallest scenario that there is, at a scale that takes no time."""
    changes = {"sim.scale_bits": 6, "duration_s": 4, "systems": ["none", "demeter"]}
    return demeter.Scenario.load(SCENARIOS / "ci.toml").set(changes)


@pytest.fixture
def command() -> Path:
    """The command of this tree: DEMETER, else what `make` built."""
    named = os.environ.get("DEMETER")
    path = Path(named) if named else ROOT / "target/release/demeter"
    if shutil.which(path) is None:
        pytest.skip(f"there is no {path}: make, or name one with DEMETER")
    return path
