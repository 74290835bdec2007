"""Check that learning rates of NeMo-RL's recipes equal those of its own code, on both backends; see `schedules.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.algorithms import build
from tests.train import cases, schedules

CASES = {case.name: case for case in schedules.golden()}


@pytest.fixture
def realm(realm):
    """Destroy Megatron-Core's groups with the realm."""
    yield
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("realm")
def test_an_imported_recipe_has_their_rates(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    recipe = schedules.imported(case, tmp_path)
    algorithm = build(recipe)
    assert (algorithm.updates_per_epoch, algorithm.advances_per_step) == (case.updates, case.calls)
    found = schedules.rates(schedules.built(recipe, case.model), len(case.lr))
    assert found == pytest.approx(case.lr, rel=0, abs=case.tolerance * max(case.lr))
    if case.updates > 1:  # else the numbers could not tell a schedule of updates from one of steps
        before = schedules.rates(schedules.built(recipe, case.model), len(case.lr), case.updates)
        assert before != pytest.approx(case.lr, rel=1e-2)


@pytest.mark.parametrize("name", ["grpo_math_8B policy dtensor", "grpo_math_8B_megatron policy megatron"])
@pytest.mark.usefixtures("realm")
def test_a_checkpoint_of_an_earlier_version_is_read(name: str, tmp_path: Path) -> None:
    """It has one count, of updates. tests/test_checkpoint.py checks that it is refused if a step has several updates."""
    recipe = schedules.imported(CASES[name], tmp_path)
    trained, batch = schedules.built(recipe, "policy"), [cases.pack([1])]
    for _ in range(3):
        cases.learn(trained, batch)
    trained.shards().write(tmp_path, 0)
    (index,) = tmp_path.glob("train-rank*.json")
    record = json.loads(index.read_text())
    steps = record.pop("schedule")
    assert record.pop("updates", steps) == steps == 3
    index.write_text(json.dumps({**record, "steps": steps}))
    expected = cases.learn(trained, batch)
    resumed = schedules.built(recipe, "policy")
    resumed.load(tmp_path)
    assert cases.learn(resumed, batch) == expected


def test_the_golden_file_covers_all_kinds() -> None:
    """Check for both backends, policy and critic, several updates in a step, several calls of train() in a step, and a
    decay.
    """
    golden = CASES.values()
    assert {case.backend for case in golden} == {"dtensor", "megatron"}
    assert {case.model for case in golden} == {"policy", "value"}
    assert max(case.updates for case in golden) == 16 and max(case.calls for case in golden) == 4
    assert any(case.lr[-1] < max(case.lr) / 2 for case in golden)
    assert min(len(case.lr) for case in golden) >= 30
