"""The GPUs that train and those that generate."""

from __future__ import annotations

import pytest

from pipeline.config.cluster import ComponentConfig
from tests.nemo_rl.test_translation import inspect, problem, read, with_keys
from tests.problems import named

COLOCATED = "policy.generation.colocated"


def size(component: ComponentConfig) -> tuple[int, int]:
    return component.nodes, component.gpus_per_node


def test_shared_gpus_stay_shared() -> None:
    loaded = inspect("grpo")
    assert loaded.recipe.policy.generation.colocated.enabled
    assert size(loaded.recipe.cluster.train) == size(loaded.recipe.cluster.generate) == (2, 8)
    assert not any(COLOCATED in note for note in loaded.notes)
    assert read("grpo", "cluster.train.nodes=4").cluster.generate.nodes == 4


def test_nodes_are_divided() -> None:
    loaded = inspect("grpo_megatron")
    assert size(loaded.recipe.cluster.train) == (2, 8) and size(loaded.recipe.cluster.generate) == (1, 8)
    assert not loaded.recipe.cluster.share_nodes
    assert loaded.origins["cluster.generate.nodes"].endswith(f"grpo_megatron.yaml:13 ({COLOCATED}.resources.num_nodes)")


@pytest.mark.parametrize("nodes", ["null", "1"])
def test_of_one_node_the_gpus_are_divided(nodes: str) -> None:
    keys = ("cluster.num_nodes=1", f"{COLOCATED}.resources.num_nodes={nodes}", f"{COLOCATED}.resources.gpus_per_node=2")
    cluster = read("grpo_megatron", *keys).cluster
    assert size(cluster.train) == (1, 6) and size(cluster.generate) == (1, 2) and cluster.share_nodes


@pytest.mark.parametrize(
    ("nodes", "resources"),
    [(1, "{num_nodes: 1, gpus_per_node: 8}"), (3, "{num_nodes: 3, gpus_per_node: 8}"), (3, "{num_nodes: 1, gpus_per_node: 4}")],
)
def test_nodes_that_cannot_be_divided_are_refused(nodes: int, resources: str) -> None:
    found = inspect("grpo_megatron", f"cluster.num_nodes={nodes}", f"{COLOCATED}.resources={resources}").problems
    assert (f"{COLOCATED}.resources", "not-divisible") in named(found)


def test_without_sampling_all_train() -> None:
    assert size(read("sft").cluster.train) == (1, 8)


def test_a_reward_model_has_gpus_of_its_own() -> None:
    judge = (
        "env.reward_model={model_name: ORG/JUDGE, precision: bfloat16, reward_model_cfg: {enabled: true, reward_model_type:"
        " bradley_terry}, resources: {num_nodes: 1, gpus_per_node: 8}, dtensor_cfg: {enabled: true, tensor_parallel_size: 1}}"
    )
    _, translation = with_keys("grpo", judge, "data.default.env_name=reward_model", "cluster.num_nodes=3")
    assert not translation.problems
    assert not translation.layer["policy"]["generation"]["colocated"]["enabled"]
    assert translation.changed[0].startswith(f"{COLOCATED}.enabled=true") and "cluster.generate.nodes" in translation.changed[0]
    sizes = {name: (given["nodes"], given["gpus_per_node"]) for name, given in translation.layer["cluster"].items()}
    assert sizes == {"train": (2, 8), "generate": (2, 8), "reward": (1, 8)}
    assert translation.layer["env"]["reward_model"]["served_by"] == "reward"


def test_a_generative_judge_has_a_node_of_its_own() -> None:
    judge = (
        "{model_name: ORG/JUDGE, num_workers: 2, tensor_parallel_size: 4, max_model_len: 9000, max_tokens: 64, temperature: 0}"
    )
    keys = f"env.llm_judge_async={judge}", "data.default.env_name=llm_judge_async"
    _, translation = with_keys("grpo", *keys)
    assert not translation.problems
    served = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.85, "max_model_len": 9000}
    assert translation.layer["judge"] == {"model_name": "ORG/JUDGE", "vllm_cfg": served}
    assert translation.layer["cluster"]["judge"] == {"gpus_per_node": 8}
    environment = translation.layer["env"]["llm_judge_async"]
    assert environment["kwargs"] == {"rating": "yes_no", "request": {"temperature": 0.0, "max_tokens": 64}}


def test_gpus_must_be_given() -> None:
    assert problem("sft", "cluster.gpus_per_node=null") == ("cluster.gpus_per_node", "too-small")
