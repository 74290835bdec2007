"""Whole runs on groups that keep NCCL's rules (tests/nccl): of each kind one, with each way to refit."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from pipeline.observe.metrics import read
from tests.end_to_end.runs import LOCAL, submit
from tests.nccl.install import SWITCH

PATIENCE = {SWITCH: "60"}
MODEL = "recipes/tiny"
ASYNC = (
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.max_trajectory_age_steps=1",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true",
)
MEGATRON = ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.tensor_model_parallel_size=2")
SHORT = ("grpo.max_num_steps=2", "checkpointing.enabled=false")


def refit(transport: str) -> tuple[str, ...]:
    return (f"policy.generation.refit_transport={transport}",)


@pytest.fixture(scope="module")
def reward_component(tmp_path_factory) -> tuple[str, ...]:
    """Return the keys of a reward model with a rank of its own."""
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(MODEL, num_labels=1))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    judge = f"env.judge={{kind: reward_model, model_name: {folder}, served_by: reward}}"
    return (judge, "data.train.env_name=judge", "data.validation.env_name=judge", "cluster.reward.ranks_per_node=1")


def run(folder: Path, *keys: str) -> set[str]:
    """Two steps to their end. Return the communicators that were made, each by its ranks."""
    done = submit(folder, *LOCAL, *SHORT, *keys, env=PATIENCE)
    assert done.status == 0, done.output
    assert len(done.metrics()) == 2
    logs = "".join(path.read_text() for path in folder.glob("attempts/*/rank*.log"))
    return set(re.findall(r"^the communicator of ranks ([\d, ]+) is made$", logs, re.MULTILINE))


def test_asynchronous_with_a_reward_component_and_planned_refits(tmp_path, reward_component):
    made = run(tmp_path / "run", *reward_component, *ASYNC, *refit("planned"))
    assert {"0, 1, 2, 3, 4", "0, 1"} <= made


@pytest.mark.full
def test_megatron_with_delta_refits(tmp_path):
    made = run(tmp_path / "run", *MEGATRON, *refit("delta"))
    assert {"0, 1, 2, 3", "0, 1"} <= made


@pytest.mark.full
def test_fsdp2_with_broadcast_refits(tmp_path, uninterrupted):
    """Compare the numbers with a run's on gloo."""
    made = run(tmp_path / "run", *refit("broadcast"))
    assert made == {"0, 1, 2, 3", "0, 1", "0, 2, 3"}
    assert_equal(read(tmp_path / "run/metrics.jsonl"), uninterrupted[:2])


@pytest.mark.full
def test_colocated(tmp_path, uninterrupted):
    """Between components that share GPUs everything goes over gloo."""
    made = run(tmp_path / "run", "policy.generation.colocated.enabled=true")
    assert made == {"0, 1"}
    assert_equal(read(tmp_path / "run/metrics.jsonl"), uninterrupted[:2])


def assert_equal(lines: list[dict], expected: list[dict]) -> None:
    """Compare all training metrics."""
    for line, other in zip(lines, expected, strict=True):
        learned = {key: value for key, value in other.items() if key.startswith("train/")}
        assert learned and learned == {key: line[key] for key in learned}


FURTHER = {
    "tensor parallel": ("policy.dtensor_cfg.tensor_parallel_size=2", *refit("delta")),
    "pipeline parallel": (*MEGATRON[:1], "policy.megatron_cfg.pipeline_model_parallel_size=2", *refit("broadcast")),
    "context parallel": (*MEGATRON[:1], "policy.megatron_cfg.context_parallel_size=2"),
    "megatron's data parallel": (*MEGATRON[:1], "grpo.val_period=1", "grpo.max_val_samples=4"),
    "megatron colocated": (*MEGATRON, "policy.generation.colocated.enabled=true"),
    "an engine of two": (
        "policy.generation.backend=vllm",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "cluster.timeouts.silence=120",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("keys", FURTHER.values(), ids=FURTHER)
def test_further_kinds(tmp_path, keys):
    assert run(tmp_path / "run", *keys)
