"""policy.deterministic: the variables of ranks, what a recipe must not combine with it, and its price in the plan."""

import dataclasses

import pytest
import torch

from launch.executors import local
from launch.executors.components import components
from launch.plan import evaluation, roofline
from launch.preflight import architecture
from pipeline import config
from pipeline.config import RECIPES, determinism
from pipeline.config.determinism import named_operators
from tests.launch.plan.plans import planned, table
from tests.problems import named, refused

ON = "policy.deterministic=true"
ON_CPUS = [f"cluster.{name}.{key}" for name in ("train", "generate") for key in ("gpus_per_node=0", "ranks_per_node=8")]
FSDP, MEGATRON = "llama8b_grpo", "llama70b_grpo"
SHARED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
TRAINERS = {**SHARED, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
ENGINES = {**SHARED, "VLLM_BATCH_INVARIANT": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}


def load(name: str, *overrides: str) -> config.Recipe:
    return config.load(name, ["run_dir=runs/none", *overrides])


def ours(recipe: config.Recipe) -> dict[str, dict[str, str]]:
    """Return those variables of each component's ranks that the key sets."""
    names = TRAINERS.keys() | ENGINES.keys()
    return {
        component: {name: value for name, value in part.env_vars.items() if name in names}
        for component, part in components(recipe).items()
    }


@pytest.mark.parametrize("name", [FSDP, MEGATRON])
def test_ranks_get_the_variables_before_python_starts(name):
    assert ours(load(name)) == {"train": {}, "generate": {}}
    assert ours(load(name, ON)) == {"train": TRAINERS, "generate": ENGINES}


def test_ranks_of_a_reward_model_and_of_an_evaluation():
    rewards = (
        "env.preference.served_by=reward",
        f"env.preference.model_name={RECIPES / 'tiny'}",
        "cluster.reward.gpus_per_node=1",
    )
    assert ours(load("llama8b_grpo_rm", ON, *rewards))["reward"] == TRAINERS
    found = config.load("suites/math", ["run_dir=runs/none", "policy.model_name=x", ON, "cluster.generate.gpus_per_node=1"])
    assert ours(found) == {"generate": ENGINES}


def test_ranks_on_cpus_need_none():
    assert ours(load("tiny_grpo", ON)) == {"train": {}, "generate": {}}


def test_the_local_executor_starts_ranks_with_them(monkeypatch):
    monkeypatch.setattr(local.gpus, "assign", lambda count, keys: [str(index) for index in range(count)])
    places = ("cluster.train.gpus_per_node=1", "cluster.generate.gpus_per_node=1")
    train, generate = local.rank_environments(components(load(FSDP, ON, *places)))
    assert TRAINERS.items() <= train.items() and ENGINES.items() <= generate.items()


@pytest.mark.parametrize(
    ("name", "overrides", "code"),
    [
        (FSDP, ["cluster.train.env_vars={NCCL_ALGO: Tree}"], "contradiction"),
        (FSDP, ["cluster.generate.env_vars={VLLM_BATCH_INVARIANT: '0'}"], "contradiction"),
        (FSDP, ["cluster.generate.env_vars={NCCL_ALGO: NVLS}"], "contradiction"),
        (MEGATRON, ["cluster.train.env_vars={NVTE_ALLOW_NONDETERMINISTIC_ALGO: '1'}"], "contradiction"),
        (MEGATRON, ["policy.megatron_cfg.model_overrides={deterministic_mode: false}"], "contradiction"),
        (MEGATRON, ["policy.megatron_cfg.model_overrides={tp_comm_overlap: true}"], "contradiction"),
        (FSDP, ["policy.generation.backend=transformers"], "contradiction"),
        (FSDP, ["cluster.generate.gpu={tmp}/v100.yaml"], "unsupported"),
    ],
)
def test_what_would_make_runs_differ_is_refused(tmp_path, name, overrides, code):
    old = (RECIPES / "hardware/h100.yaml").read_text().replace("compute_capability: 9.0", "compute_capability: 7.0")
    (tmp_path / "v100.yaml").write_text(old)
    given = [override.replace("{tmp}", str(tmp_path)) for override in overrides]
    load(name, *given)
    with refused((determinism.KEY, code)):
        load(name, *given, ON)
    load(name, *given, ON, *ON_CPUS)


@pytest.mark.parametrize(
    "allowed",
    [
        ["cluster.train.env_vars={NCCL_ALGO: Ring, NCCL_DEBUG: WARN}"],
        ["policy.dtensor_cfg.flash_attention=3"],
        ["policy.dtensor_cfg.use_liger_kernel=true"],
        ["policy.generation.vllm_cfg.precision=fp8"],
    ],
)
def test_what_is_deterministic_is_taken(allowed):
    load(FSDP, *allowed, ON)


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_models_with_state_spaces_are_refused_on_gpus(model):
    def problems(*overrides: str) -> set[tuple[str, str]]:
        recipe = load(FSDP, f"policy.model_name={model}", *overrides)
        return {found for found in named(architecture.against_layout(recipe)) if found[0] == determinism.KEY}

    assert problems(ON) == {(determinism.KEY, "unsupported")}
    assert problems() == problems(ON, *ON_CPUS) == set()


# ---- the plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FSDP, MEGATRON])
def test_the_plan_counts_slower_kernels(name):
    fast, slow = planned(name), planned(name, ON)
    times = {clock: slow.seconds[clock] / fast.seconds[clock] for clock in fast.seconds}
    assert 1.05 < times["train"] <= roofline.TRAINING_SLOWDOWN and 1.2 < times["rollout"] <= roofline.GENERATION_SLOWDOWN
    assert times["refit"] == 1
    assert slow.validation > 1.2 * fast.validation
    assert "policy.deterministic: kernels take 1.15 times as long in training and 1.5 times as long in engines" in table(slow)
    assert "policy.deterministic" not in table(fast)


def test_so_does_the_plan_of_an_evaluation():
    overrides = ["run_dir=runs/none", "policy.model_name=Qwen/Qwen3-8B", "cluster.generate.gpus_per_node=1"]
    fast, slow = (evaluation.plan(config.load("suites/math", [*overrides, *more]), reads=False) for more in ((), (ON,)))
    took = [sum(found.task_seconds(dataclasses.replace(task, questions=100)) for task in found.tasks) for found in (fast, slow)]
    assert 1.2 < took[1] / took[0] <= roofline.GENERATION_SLOWDOWN
    assert "1.5 times as long in engines" in evaluation.text(slow) and "in training" not in evaluation.text(slow)


# ---- operators without a deterministic kernel ----------------------------------------------------------------------------


def test_an_operator_without_a_deterministic_kernel_is_named_with_the_key():
    torch.use_deterministic_algorithms(True)
    try:
        with refused((determinism.KEY, "unsupported")) as raised, named_operators():
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert " put_," in str(raised.value)


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="of another kind"), named_operators():
        raise RuntimeError("of another kind")
