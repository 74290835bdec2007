"""The plan of train and generate ranks that share GPUs."""

import pytest

from launch.plan import backend_choice, memory, shared_gpus
from launch.plan.estimate import Plan
from launch.plan.rank_division import train_parallelism
from launch.plan.refit import node_names
from pipeline import config
from pipeline.config import hardware
from tests.launch.plan.plans import planned, table

SHARED = ("policy.generation.colocated.enabled=true",)
BY_HOST = ("policy.generation.colocated.refit=host",)
BROADCAST = ("policy.generation.refit_transport=broadcast",)
GIGA = 1e9
ASSUMED = hardware.gpu("h100").assumed


def made(*overrides: str) -> Plan:
    return planned("llama8b_grpo_sync", *overrides)


def test_each_turn_counts_what_each_rank_holds():
    found = made(*SHARED)
    rollout, training, refit = found.turns
    train, generate, recipe = found.train, found.generate, found.recipe
    staging = memory.staging(recipe, found.shapes["policy"], train_parallelism(recipe.policy, recipe.cluster.train))
    stays = train.parts["runtime"] + staging
    asleep = generate.parts["runtime"] + generate.parts["buffers"]
    assert rollout.total == pytest.approx(stays + generate.total)
    assert training.total == pytest.approx(train.total + asleep)
    assert refit.total == pytest.approx(stays + train.parts["weights"] + asleep + generate.parts["weights"])
    moved = train.parts["weights"] + train.parts["optimizer"]
    assert found.host == pytest.approx(train.host + moved)
    assert made(*SHARED, "policy.generation.refit_transport=delta").host == pytest.approx(
        found.host + generate.parts["weights"]
    )
    assert not made().turns and made().host == made().train.host


def test_a_refit_reads_the_merged_weights_of_a_policy_with_adapters():
    """The base weights and adapters wait on the host when the merged weights are read; later both do."""
    found = made(*SHARED, "policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.enabled=true")
    parts, refit = found.train.parts, found.turns[2]
    assert 0.8 * parts["weights"] < parts["merged weights"] < parts["weights"]  # without embedding and head
    rest = refit.train - parts["runtime"] - parts["merged weights"]
    assert 0 < rest < parts["buffers"]  # the refit's staging
    assert found.host == pytest.approx(found.train.host + parts["weights"] + parts["merged weights"] + parts["optimizer"])


def test_a_step_pays_for_the_moves_and_for_half_the_gpus():
    found, apart = made(*SHARED), made()
    assert (found.gpus, apart.gpus) == (8, 16)
    assert found.seconds["rollout"] == pytest.approx(apart.seconds["rollout"])
    rate = ASSUMED.page_locked * GIGA * hardware.gpu("h100").host_gb_per_s
    moved = found.train.parts["weights"] + found.train.parts["optimizer"]
    assert found.seconds["train"] == pytest.approx(apart.seconds["train"] + moved / rate)
    weights = found.generate.parts["weights"]
    assert found.seconds["refit"] == pytest.approx(moved / rate + weights / (ASSUMED.ipc_gb_per_s * GIGA))
    expected = moved / rate + 2 * weights / rate + weights / (ASSUMED.gloo_gb_per_s * GIGA)
    for keys in (BY_HOST, BROADCAST):
        assert made(*SHARED, *keys).seconds["refit"] == pytest.approx(expected)


def test_all_transfers_stay_within_a_node():
    recipe, _ = backend_choice.choose(
        config.load("llama8b_grpo_sync", [*SHARED, "cluster.train.nodes=2", "cluster.generate.nodes=2"])
    )
    names = node_names(recipe)
    assert len(names) == 32 and len(set(names.values())) == 2
    assert all(names[rank] == names[16 + rank] for rank in range(16))


def test_weights_read_over_ipc_are_staged_once():
    """An engine's rank that relays keeps its own two of three rounds; between nodes two more arrive over the network."""
    nodes = ("cluster.train.nodes=2", "cluster.generate.nodes=2")
    by_host, by_ipc, across = (made(*SHARED, *keys).generate for keys in (BY_HOST, (), nodes))
    bucket = made().recipe.policy.generation.refit_cfg.bucket_bytes
    assert by_host.parts["buffers"] - by_ipc.parts["buffers"] == bucket
    assert across.parts["buffers"] - by_ipc.parts["buffers"] == 2 * bucket


@pytest.mark.parametrize("by", ["ipc", "host"])
@pytest.mark.parametrize("trainer", ["dtensor_cfg", "megatron_cfg"])
def test_between_nodes_weights_go_over_tcp(trainer, by):
    """Each of 16 FSDP2 ranks has a sixteenth of the weights; with Megatron-Core each rank has all of them."""
    nodes = ("cluster.train.nodes=2", "cluster.generate.nodes=2", f"policy.generation.colocated.refit={by}")
    found = made(*SHARED, *nodes, "policy.dtensor_cfg.enabled=false", f"policy.{trainer}.enabled=true")
    parts = {phase.name: phase.parts for phase in found.phases}["weights to the engines"]
    weights = found.generate.parts["weights"]
    name, rate = ("CUDA IPC", ASSUMED.ipc_gb_per_s) if by == "ipc" else ("gloo", ASSUMED.gloo_gb_per_s)
    near = parts[name] * rate * GIGA
    far = parts.get("gloo between nodes", 0.0) * shared_gpus.TCP_GB_PER_S * GIGA
    assert near + far / 8 == pytest.approx(weights)
    assert far == (pytest.approx(0.5 * weights, rel=0.01) if trainer == "dtensor_cfg" else 0.0)  # once to a node
    copied = 2 * (far / 8 if by == "ipc" else weights)
    link = ASSUMED.page_locked * GIGA * hardware.gpu("h100").host_gb_per_s
    assert parts.get("to and from the host", 0.0) == pytest.approx(copied / link)


def test_a_reward_model_scores_beside_the_engine():
    judge = "env={judge: {kind: reward_model, model_name: meta-llama/Llama-3.1-8B-Instruct}, math: {kind: math}}"
    for trainer in ("dtensor_cfg", "megatron_cfg"):
        keys = (*SHARED, "policy.dtensor_cfg.enabled=false", f"policy.{trainer}.enabled=true")
        alone, found = made(*keys), made(*keys, judge)
        rollouts = [plan.turns[0].train for plan in (alone, found)]
        shape = found.shapes["env.judge"]
        least = 2 * (shape.parameters if trainer == "megatron_cfg" else shape.largest_layer)  # whole, or gathered
        assert least < rollouts[1] - rollouts[0] < least + 40 * GIGA
        assert found.host - found.train.host == pytest.approx(alone.host - alone.train.host)  # it is there already


def test_a_turn_that_does_not_fit_is_warned_of_and_the_table_shows_it():
    full = made(*SHARED, "policy.generation.vllm_cfg.gpu_memory_utilization=0.99")
    assert not full.fits
    assert any("in the rollout" in text and "and has 84.9" in text for text in full.warnings())
    text = table(made(*SHARED))
    for part in ("the same GPUs in turn", "a GPU holds in rollout", "by CUDA IPC", "ranks that share a GPU:"):
        assert part in text, part
    assert "through host memory" in table(made(*SHARED, *BY_HOST))
    assert "fits, by these estimates" in text
