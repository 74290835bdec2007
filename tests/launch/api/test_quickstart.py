"""launch/quickstart.ipynb runs from its first cell to its last, and is stored without outputs."""

import json
import os

import pytest

from launch.executors.executor import ROOT

NOTEBOOK = ROOT / "launch/quickstart.ipynb"


def test_the_notebook_is_stored_without_outputs():
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_notebook_runs(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}})
    paths = os.pathsep.join([str(ROOT), str(ROOT / "launch/api")])
    client.execute(env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    printed = "".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", ()))
    assert "unknown-key: sft.max_num_stepz" in printed and "saved and stopped, as asked" in printed
    assert (tmp_path / "runs/tiny_grpo/hf_step_3/model.safetensors").exists()
