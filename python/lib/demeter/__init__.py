"""Tiered memory for virtual machines: scenarios, the simulator, sweeps.

>>> import demeter
>>> scenario = demeter.Scenario.load("scenarios/gups.toml").set({"workload.hot_mib": 50})
>>> result = demeter.run(scenario, systems=["none", "demeter"])
>>> print(result)
"""

from demeter._core import Error, Scenario, systems
from demeter._result import Result, Table
from demeter._run import Progress, run
from demeter._sweep import SweepResult, sweep

__all__ = [
    "Error",
    "Progress",
    "Result",
    "Scenario",
    "SweepResult",
    "Table",
    "run",
    "sweep",
    "systems",
]
