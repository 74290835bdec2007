"""Keys that nothing reads: an error on the command line, a note in the recipe's own file, silent if inherited."""

import pytest

from launch.plan import backend_choice
from launch.recipes import reading
from pipeline import config

MEGATRON, DTENSOR = "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=true"
RATE = "policy.megatron_cfg.optimizer.lr=1e-4"
BOTH = """\
defaults: {parent}
policy:
  dtensor_cfg: {{activation_checkpointing: true}}
  megatron_cfg: {{optimizer: {{lr: 1e-4, weight_decay: 0.1}}, empty_unused_memory_level: 1}}
"""


def unread(name, *overrides):
    loaded = config.inspect(name, list(overrides))
    assert loaded.problems == []
    return loaded.unread(backend_choice.choose(loaded.recipe)[0])


@pytest.mark.parametrize(
    ("overrides", "key", "instead"),
    [
        ([RATE], "policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr"),
        ([RATE, DTENSOR], "policy.megatron_cfg.optimizer.lr", "policy.optimizer.kwargs.lr"),
        (
            [MEGATRON, "policy.dtensor_cfg.activation_checkpointing=true"],
            "policy.dtensor_cfg.activation_checkpointing",
            "policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=true",
        ),
        (
            [MEGATRON, RATE, "policy.optimizer.kwargs.lr=1e-4"],
            "policy.optimizer.kwargs.lr",
            "policy.megatron_cfg.optimizer.lr",
        ),
        (["ppo.max_num_steps=3"], "ppo.max_num_steps", "grpo.max_num_steps"),
        (["value.optimizer.kwargs.lr=1e-4"], "value.optimizer.kwargs.lr", "leave it out"),
        (["loss_fn.zero_outside_topk=true"], "loss_fn.zero_outside_topk", "leave it out"),
        (["dpo.label_smoothing=0.1"], "dpo.label_smoothing", "leave it out"),
    ],
)
def test_an_unread_key_on_the_command_line_is_refused(overrides, key, instead):
    (problem,), _ = unread("tiny_grpo", *overrides)
    assert (problem.origin, problem.key, problem.code) == ("the command line", key, "has-no-effect")
    assert instead in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        [MEGATRON, RATE],
        [MEGATRON, "policy.dtensor_cfg.enabled=false"],
        ["policy.optimizer.kwargs.lr=1e-4", "policy.megatron_cfg.tensor_model_parallel_size=1"],  # a default changes nothing
        ["ppo.max_num_steps=3", "grpo.max_num_steps=${ppo.max_num_steps}"],
        ["grpo.async_grpo.max_generation_failures=3"],
    ],
)
def test_a_key_that_is_read_is_accepted(overrides):
    assert unread("tiny_grpo", *overrides)[0] == []


def test_distillation_reads_only_its_own_loss_keys():
    (problem,), _ = unread("tiny_distillation", "loss_fn.ratio_clip_min=0.3", "loss_fn.kl_type=forward")
    assert (problem.key, problem.code) == ("loss_fn.ratio_clip_min", "has-no-effect")


def test_a_file_may_have_the_sections_of_both(tmp_path):
    (tmp_path / "both.yaml").write_text(BOTH.format(parent=config.find("tiny_grpo").resolve()))
    (tmp_path / "child.yaml").write_text("defaults: both.yaml\n")
    own = str(tmp_path / "both.yaml")
    problems, (note,) = unread(own)
    keys = [f"policy.megatron_cfg.{key}" for key in ("optimizer.lr", "optimizer.weight_decay", "empty_unused_memory_level")]
    assert problems == [] and note == f"{own}: {', '.join(keys)}: not read, because the backend is FSDP2"
    problems, (note,) = unread(own, MEGATRON)
    assert problems == [] and "policy.dtensor_cfg.activation_checkpointing: not read, because the backend is Megatron" in note
    assert unread(str(tmp_path / "child.yaml")) == ([], [])


def test_sections_of_other_algorithms_in_a_file_are_noted(tmp_path):
    sections = "sft: {max_num_steps: 7}\nppo: {max_num_steps: 7}\nloss_fn: {zero_outside_topk: true}"
    (tmp_path / "two.yaml").write_text(f"defaults: {config.find('tiny_sft').resolve()}\n{sections}\n")
    own = str(tmp_path / "two.yaml")
    problems, (note,) = unread(own)
    unread_keys = "ppo.max_num_steps, loss_fn.zero_outside_topk"
    assert problems == [] and note == f"{own}: {unread_keys}: not read, because the algorithm is sft"
    pairs = ("data.train.dataset_name=scratchpad_preferences", "data.validation=null")
    note, inherited = unread(own, "algorithm=rm", *pairs)[1]
    assert note.startswith(f"{own}: sft.max_num_steps, ppo.max_num_steps") and "sft.val_at_end" in inherited


def test_inherited_keys_that_a_change_of_the_algorithm_drops_are_noted(tmp_path):
    own, parent = tmp_path / "own.yaml", config.find("tiny_grpo").resolve()
    batch = "policy.train_global_batch_size=32"
    own.write_text(f"defaults: {parent}\nalgorithm: ppo\nppo: {{max_num_steps: 3}}\n")
    (tmp_path / "child.yaml").write_text("defaults: own.yaml\n")
    keys = "grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.val_period"
    problems, (note,) = unread(str(own), batch)
    assert (
        problems == [] and note.startswith(f"{own}: {keys} and ") and "They are inherited; try them in the section ppo" in note
    )
    assert unread(str(own), "algorithm=grpo")[1] == [f"{own}: ppo.max_num_steps: not read, because the algorithm is grpo"]
    (note,) = unread(str(tmp_path / "child.yaml"), batch, "algorithm=distillation", "teacher.model_name=x")[1]
    assert "grpo.num_prompts_per_step" in note and "the algorithm is distillation" in note
    assert unread(str(tmp_path / "child.yaml"), batch) == ([], [])
    own.write_text(own.read_text().replace("max_num_steps: 3", "num_prompts_per_step: 32, num_generations_per_prompt: 1"))
    assert "num_prompts_per_step" not in unread(str(own), batch)[1][0]


@pytest.mark.parametrize("path", sorted(config.RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_recipe_drops_inherited_keys(path):
    loaded = reading.inspect(str(path))
    assert "They are inherited" not in "\n".join(loaded.unread(loaded.recipe)[1])


def test_on_the_command_line_of_a_recipe_of_nemo_rls():
    theirs = str(config.RECIPES.parent / "tests/nemo_rl/recipes/grpo.yaml")
    before = reading.inspect(theirs)
    given = reading.inspect(theirs, [RATE])
    backends = before.recipe.policy.dtensor_cfg.enabled, before.recipe.policy.megatron_cfg.enabled
    assert backends == (True, False)
    (problem,) = set(given.problems) - set(before.problems)
    assert str(problem).startswith(
        "the command line: policy.megatron_cfg.optimizer.lr: the backend is FSDP2, which does not read it; try"
    )


@pytest.mark.parametrize("key", ["data.train.kwargs.siz=3", "data.train.split=foo", "data.train.subset=foo"])
def test_a_key_of_named_data_is_refused_for_a_file_on_the_command_line(key):
    (problem,), _ = unread("tiny_sft", "data.train.data_path=rows.jsonl", key)
    assert (problem.key, problem.code) == (key.partition("=")[0], "has-no-effect")
    assert unread("tiny_sft", "data.train.dataset_name=GSM8K", "data.train.split=foo")[0] == []


def test_a_key_of_named_data_is_refused_in_the_file_that_has_the_path(tmp_path):
    parent = config.find("tiny_sft").resolve()
    (tmp_path / "own.yaml").write_text(f"defaults: {parent}\ndata: {{train: {{data_path: rows.jsonl, split: foo}}}}\n")
    (tmp_path / "child.yaml").write_text("defaults: own.yaml\n")
    (tmp_path / "named.yaml").write_text(f"defaults: {parent}\ndata: {{train: {{dataset_name: GSM8K, split: foo}}}}\n")
    (problem,), _ = unread(str(tmp_path / "own.yaml"))
    assert (problem.key, problem.code) == ("data.train.split", "has-no-effect")
    assert unread(str(tmp_path / "child.yaml"))[0] == []
    assert unread(str(tmp_path / "named.yaml"), "data.train.data_path=rows.jsonl")[0] == []


def test_keys_of_an_evaluations_tasks_are_read(tmp_path):
    """The user names the tasks, so the schema's defaults have none of their keys."""
    given = ["policy.model_name=m", f"run_dir={tmp_path}", "evaluate.tasks.addition.data.max_samples=8"]
    loaded = config.inspect(str(config.RECIPES / "suites/tiny.yaml"), given)
    assert "evaluate.tasks.addition.data.max_samples" not in {each.key for each in loaded.unread(loaded.recipe)[0]}
