"""With max_num_steps=0 a run validates once without training, from its initial model or its last checkpoint."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config import RECIPES
from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, submit

pytestmark = pytest.mark.full


def test_a_run_is_evaluated_before_between_and_after_its_steps(tmp_path):
    """Its training is the same as without, to the last bit."""
    common = (*LOCAL, "grpo.max_val_samples=6")
    plain = submit(tmp_path / "plain", *common, "grpo.max_num_steps=2", "grpo.val_at_start=true")
    assert plain.status == 0, plain.output
    folder, done = tmp_path / "run", tmp_path / "run/done.json"
    for steps, step in ((0, 0), (1, 1), (0, 1), (2, 2), (0, 2)):
        run = submit(folder, *common, f"grpo.max_num_steps={steps}", "grpo.val_at_start=true")
        assert run.status == 0, run.output
        assert json.loads(done.read_text()) == {"step": step} | ({} if steps else {"evaluation": True})
        lines = read(folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(step + 1))
        assert steps or "val/reward" in lines[-1]
    for line, before in zip(run.metrics(), plain.metrics(), strict=True):
        assert {key: line[key] for key in before} == before
        assert "val/reward" in line
    assert (folder / "rollouts/val_000002.jsonl").exists()


@pytest.mark.parametrize("recipe", ["tiny_sft", "tiny_dpo", "tiny_rm", "tiny_ppo", "tiny_distillation"])
def test_every_algorithm_evaluates_alone(tmp_path, recipe):
    own = ("policy.model_name=recipes/tiny", "policy.random_init=true", "needs=[]", "cluster.train.ranks_per_node=1")
    more = {
        "tiny_ppo": ("policy.generation.backend=transformers", "cluster.generate.ranks_per_node=1"),
        "tiny_distillation": ("policy.generation.backend=transformers", "cluster.generate.ranks_per_node=1"),
    }.get(recipe, ())
    if recipe == "tiny_distillation":  # a teacher has weights of its own
        teacher = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(RECIPES / "tiny"))
        shutil.copytree(RECIPES / "tiny", tmp_path / "teacher")
        teacher.save_pretrained(tmp_path / "teacher")
        more = (*more, f"teacher.model_name={tmp_path}/teacher")
    key = recipe.removeprefix("tiny_")
    folder = tmp_path / "run"
    run = submit(folder, f"recipe={recipe}", *LOCAL, *own, *more, f"{key}.max_num_steps=0", f"{key}.max_val_samples=8")
    assert run.status == 0, run.output
    (line,) = run.metrics()
    assert line["step"] == 0 and any(name.startswith("val/") for name in line)
    assert json.loads((folder / "done.json").read_text()) == {"step": 0, "evaluation": True}
    assert not list((folder / "checkpoints").glob("step_*"))
