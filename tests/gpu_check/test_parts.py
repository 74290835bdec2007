"""The parts: their order, the tests among them, runs, and what single measurements count."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.gpu_check import areas, parts, runs, waits
from tests.gpu_check.measurement import Place
from tests.gpu_check.parts import MACHINE, Part
from tests.gpu_check.processes import Processes
from tests.gpu_check.samples import place
from tests.gpu_check.table import FAILED, LEFT_OUT, PASSED

ROOT = Path(__file__).parents[2]


def every(folder: Path = Path("/tmp")) -> dict[str, Part]:
    return {part.name: part for part in parts.every(place(folder))}


def test_the_most_telling_parts_come_first():
    """In 570 seconds on one GPU without vLLM come all of these; the names that `parts` takes have no commas."""
    names = list(every())
    first = [MACHINE, "attention", "world", "families: FSDP2", "train: FSDP2 eager", "train: FSDP2", "refit: shared GPU"]
    first += ["offload", "reference", "families: Megatron-Core", "train: Megatron-Core", "run: tiny_sft", "run: tiny_grpo"]
    several = {name for name, part in every().items() if part.gpus > 1 or ("vllm" in part.needs and name not in first)}
    assert [name for name in names if name not in several][: len(first)] == first
    assert names.index("refit: a GPU each") < names.index("tests: vLLM") < names.index("offload")
    assert names[-1] == "decode: transformers"
    assert sum(every()[name].seconds[0] for name in first) < 570
    assert not any("," in name for name in names)


def test_every_test_that_needs_a_gpu_is_in_an_area():
    files = {ROOT / path for area in areas.AREAS.values() for path in area.files}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()}
    assert files == marked - {Path(__file__)}
    assert {f"tests: {name}" for name in areas.AREAS} == {name for name in every() if name.startswith("tests: ")}
    chosen: dict[tuple, set[str]] = {}
    for area in areas.AREAS.values():
        chosen.setdefault(area.files, set()).add(area.chosen)
    assert all(of in ({""}, {"float32", "not float32"}) for of in chosen.values())


def test_a_run_without_the_model_of_sft_takes_random_weights(tmp_path):
    shared = runs.command(runs.SHARED, place(tmp_path), vllm=False)
    assert "policy.random_init=true" in shared and "policy.generation.colocated.enabled=true" in shared
    (runs.folder(runs.SFT, place(tmp_path)) / "hf").mkdir(parents=True)
    assert f"policy.model_name={tmp_path}/runs/tiny_sft/hf" in runs.command(runs.SHARED, place(tmp_path), vllm=False)


@pytest.mark.parametrize(
    ("body", "outcome", "note"),
    [
        pytest.param("def test_a(): pass", PASSED, "1 of 1 tests passed", marks=pytest.mark.full),
        ("def test_a(): pass\ndef test_b(): pytest.skip('few GPUs')", PASSED, "1 of 2 tests passed, 1 skipped"),
        pytest.param(
            "def test_b(): pytest.skip('few GPUs')", LEFT_OUT, "0 of 1 tests passed, 1 skipped", marks=pytest.mark.full
        ),
        (
            "def test_a(record_property): record_property('x', 7)\ndef test_b(): assert 0",
            FAILED,
            "1 of 2 tests passed; failed: test_b",
        ),
        pytest.param("import no_such_package", FAILED, "0 of 1 tests passed; failed: test_it", marks=pytest.mark.full),
        pytest.param("", LEFT_OUT, "it has no test that needs a GPU", marks=pytest.mark.full),
    ],
)
def test_results_of_an_area_of_tests(tmp_path, monkeypatch, body, outcome, note):
    """pytest's own report of a file of tests is read."""
    (tmp_path / "test_it.py").write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    area = areas.Area((str(tmp_path), f"--rootdir={tmp_path}", f"-c{tmp_path}/pytest.ini"))
    monkeypatch.setitem(areas.AREAS, "x", area)
    on_gpu = Place("cuda", "tiny", 1, tmp_path)
    running = Processes(on_gpu)
    result = running.run(parts._tests("x", (1, 1), (), on_gpu), 100)
    assert (result.outcome, result.note) == (outcome, note), running.log
    assert result.details == ({"test_a": {"x": "7"}} if "record_property" in body else {})


def test_waits_for_the_gpu_are_counted(monkeypatch):
    """torch's warning stands in for a wait: in a layer, between layers, and of another kind."""

    class Layer(nn.Module):
        def forward(self, x):
            warnings.warn(waits.SYNCHRONIZES, stacklevel=1)
            return x

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    layers = [Layer(), Layer()]
    with waits.counted(Place("cuda", "tiny", 1, Path()), layers) as found:
        x = layers[1](layers[0](torch.ones(1)))
        warnings.warn(waits.SYNCHRONIZES, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert (len(found.inside), len(found.places), modes) == (2, 3, ["warn", "default"])
    assert all("test_parts.py:" in line for line in found.places)
    layers[0](x)
    assert len(found.places) == 3
