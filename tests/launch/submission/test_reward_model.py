"""A recipe with a reward model: errors before submission, and the component that it may have."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from launch.executors.components import components
from launch.executors.local import rank_environments
from launch.executors.slurm import batch_script
from launch.plan import backend_choice
from launch.preflight import architecture, input_files, model_weights
from launch.runs import run_setup
from pipeline import config
from tests.launch.model import write_model, write_recipe, write_weights
from tests.problems import named, refused

JUDGE = {
    "model_type": "llama",
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 64,
}
APART = ("env.judge.served_by=reward", "cluster.reward.ranks_per_node=2")


@pytest.fixture
def load(tmp_path):
    """Return load(*overrides, key=value of the reward model's config.json ...)."""
    path = write_recipe(
        tmp_path, env={"judge": {"kind": "reward_model", "model_name": str(tmp_path / "judge")}, "math": {"kind": "math"}}
    )
    write_model(tmp_path / "judge")

    def loaded(*overrides: str, **described):
        found = {key: value for key, value in (JUDGE | described).items() if value is not None}
        (tmp_path / "judge/config.json").write_text(json.dumps(found))
        with contextlib.suppress(KeyError, ValueError):  # of a family or sizes that are refused
            write_weights(tmp_path / "judge")
        return config.load(str(path), list(overrides))

    return loaded


def cut(backend_section: str, **keys) -> list[str]:
    """Return overrides for four train ranks."""
    layout = [f"policy.{backend_section}.{key}={value}" for key, value in {"enabled": "true", **keys}.items()]
    return ["cluster.train.ranks_per_node=4", *layout]


def check(recipe: config.Recipe, pending: list[Path] = ()) -> config.Recipe:
    """Check a recipe as a submission does."""
    recipe, _ = backend_choice.choose(recipe, pending)
    config.refuse([*input_files.problems(recipe, pending), *model_weights.problems(recipe, pending)])
    return recipe


def test_a_valid_reward_model_passes(load):
    check(load())
    check(load(*APART))
    check(load("env.judge.hf_config_overrides={num_labels: 1}", id2label={"0": "no", "1": "yes"}))


@pytest.mark.parametrize("model", ["judge", "model"])
def test_an_evaluated_model_is_a_reward_model_or_one_that_samples(load, tmp_path, monkeypatch, model):
    """The suite of reward models samples nothing."""
    monkeypatch.setattr(architecture, "is_described", lambda recipe: True)  # as of a recipe with GPUs
    load()
    write_weights(tmp_path / "model")
    keys = [f"policy.model_name={tmp_path / model}", f"run_dir={tmp_path}/run", "policy.max_total_sequence_length=32"]
    recipe = config.load("suites/reward", keys)
    found = named([*architecture.problems(recipe), *model_weights.problems(recipe)])
    of_scorer = {("evaluate.reward_model.model_name", "unavailable-model"), ("policy.model_name", "unavailable-model")}
    assert found == (of_scorer if model == "model" else set())


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["env.judge.served_by=policy"], ("env.judge.served_by", "not-a-choice")),
        (["env.judge.precision=fp8"], ("env.judge.precision", "not-a-choice")),
        (["env.judge.model_name=null"], ("env.judge.model_name", "missing-value")),
        (["env.math.model_name=some/where"], ("env.math.model_name", "has-no-effect")),
        (["env.second={kind: reward_model, model_name: x}"], ("env", "contradiction")),
        ([*APART, "cluster.reward.nodes=0"], ("cluster.reward.nodes", "too-small")),
        (
            [*APART, "cluster.reward.ranks_per_node=3", *cut("dtensor_cfg", tensor_parallel_size=2)],
            ("policy.dtensor_cfg.tensor_parallel_size", "not-divisible"),
        ),
        (
            [*APART, *cut("megatron_cfg", tensor_model_parallel_size=4, sequence_parallel="true")],
            ("policy.megatron_cfg.tensor_model_parallel_size", "not-divisible"),
        ),
    ],
)
def test_contradicting_keys_are_refused(load, overrides, problem):
    with refused(problem):
        load(*overrides)


@pytest.mark.parametrize(
    ("described", "key", "code"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "env.judge.model_name", "unavailable-model"),
        ({"architectures": []}, "env.judge.model_name", "unavailable-model"),
        ({"id2label": {"0": "no", "1": "yes"}}, "env.judge.model_name", "unavailable-model"),
        ({"id2label": None}, "env.judge.model_name", "unavailable-model"),
        ({"max_position_embeddings": 16}, "policy.max_total_sequence_length", "too-large"),
        ({"vocab_size": 30}, "env.judge.tokenizer.name", "too-large"),
    ],
)
def test_a_model_that_is_not_a_classifier_is_refused(load, described, key, code):
    with refused((key, code)):
        check(load(**described))


def test_a_layout_that_does_not_fit_the_reward_model_is_refused(load, tmp_path):
    keys = ("cluster.train.ranks_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2")
    check(load(*keys))
    with refused(("policy.dtensor_cfg.tensor_parallel_size", "not-divisible")):
        check(load(*keys, num_attention_heads=3, num_key_value_heads=3))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 64}
    described = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(described | sizes))
    check(load("policy.megatron_cfg.enabled=true", **sizes))
    with refused(("env.judge.model_name", "unsupported")):
        check(load("policy.megatron_cfg.enabled=true", model_type="gpt2"))
    with refused(("env.judge.model_name", "missing-value")):
        check(load("policy.megatron_cfg.enabled=true", hidden_size=None))


def test_missing_files_are_refused(load, tmp_path):
    recipe = load()
    (tmp_path / "judge/model.safetensors").unlink()
    with refused(("env.judge.model_name", "file-not-found")):
        check(recipe)
    (tmp_path / "judge/tokenizer.json").unlink()
    write_weights(tmp_path / "judge")
    with refused(("env.judge.tokenizer.name", "file-not-found")):
        check(recipe)
    shutil.rmtree(tmp_path / "judge")
    with refused(("env.judge.model_name", "file-not-found")):
        check(recipe)
    check(recipe, pending=[tmp_path / "judge"])  # it is yet to come


def test_a_classifier_without_its_head_is_refused(load, tmp_path, monkeypatch):
    """The job would start with a random one."""
    monkeypatch.setattr(architecture, "is_described", lambda recipe: True)  # as of a recipe with GPUs
    recipe = load()
    described = json.loads((tmp_path / "judge/config.json").read_text())
    (tmp_path / "judge/config.json").write_text(json.dumps({**described, "architectures": []}))
    write_weights(tmp_path / "judge")
    (tmp_path / "judge/config.json").write_text(json.dumps(described))
    with refused(("env.judge.model_name", "unavailable-model")):
        check(recipe)


def test_a_chat_template_is_needed_of_both_tokenizers(load):
    chat = ("data.apply_chat_template=true", "policy.tokenizer.chat_template='{{ messages[0].content }}'")
    with refused(("data.apply_chat_template", "missing-value")):
        check(load(*chat))


# ---- the component ------------------------------------------------------------------------------------------------------


def test_ranks_of_its_own_are_a_third_component(load, tmp_path):
    assert list(components(load())) == ["train", "generate"]
    assert list(components(load(*APART, "algorithm=sft"))) == ["train"]
    parts = components(load(*APART, "cluster.reward.env_vars={A: own}"))
    assert list(parts) == ["train", "generate", "reward"]
    ranks = rank_environments(parts)
    assert [each["HETSTEP_COMPONENT"] for each in ranks] == ["train", "generate", "reward", "reward"]
    assert ranks[2]["A"] == "own" and "A" not in ranks[0]
    script = batch_script(tmp_path, "a", load(*APART).cluster, parts)
    assert script.count("#SBATCH hetjob") == 2
    assert [f"--het-group={k} " in script for k in range(4)] == [True, True, True, False]
    assert "HETSTEP_WORLD_SIZE=4" in script and "HETSTEP_RANK=$((2 + SLURM_PROCID))" in script


def test_a_resumed_run_may_serve_it_elsewhere(load):
    for override in (*APART, "env.judge.cpu_offload=false"):
        assert not run_setup.differences(load(), load(override))
    assert "env.judge.model_name" in run_setup.differences(load(), load("env.judge.model_name=other"))
