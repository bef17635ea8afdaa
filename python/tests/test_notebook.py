"""The notebook runs from its first cell to its last, and shows what it says."""

from pathlib import Path

import pytest
from conftest import SCENARIOS

NOTEBOOK = Path(__file__).parents[1] / "examples/flushes-and-heat.ipynb"


def test_the_notebook_shows_the_table_and_the_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for library in ("ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(library)
    monkeypatch.setenv("DEMETER_QUICK", "1")
    monkeypatch.setenv("DEMETER_SCENARIOS", str(SCENARIOS))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 3
    said = "".join(out.get("text", "") for out in outputs)
    lines = [line for line in said.splitlines() if line.endswith(("agrees", "differs"))]
    # As many lines as the scenario has figures; one of them is known to differ.
    assert len(lines) == 15
    assert [line.split()[0] for line in lines if line.endswith("differs")] == [
        "counters.flush_guest_local_all"
    ]
