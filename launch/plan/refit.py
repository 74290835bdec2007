"""Estimate the bytes and the seconds of a recipe's refit, by one rule for all models and both train backends.

Every generate rank receives its part of its engine's weights. Engines form the sharing groups of a run
(`pipeline/refit/balance.py`): train ranks send every byte once to each group, all of them equally much, and engines of a group
pass it on. A refit takes the time of its bytes on the slowest path, of one latency for each round of a bucket, and of the
copies of what is passed on. In a broadcast, rank 0 sends the whole model around a ring of all ranks.

Not counted: train ranks that must send more than others because only they hold some weights, ranks that wait for each other,
and further messages of a round. So a refit takes longer than estimated: in `python launch/plan_refit.py`, which lays out the
real messages, up to 1.5 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.memory_parts import TrainModel
from launch.plan.rank_division import GIGA, Parallelism
from launch.plan.rank_memory import of_stages
from pipeline.config import (
    PRECISIONS,
    Recipe,
    colocated,
    engine_ranks,
    expert_tensor_parallel_size,
    ranks,
    ranks_per_node,
    uses_megatron,
)
from pipeline.config.cluster import COPIES_GB_PER_S, LATENCY_US, NetworkConfig
from pipeline.models.shape import ModelShape
from pipeline.refit.balance import sharing_groups
from pipeline.train.adapters.spec import refits_adapters


@dataclass(frozen=True, slots=True)
class RefitEstimate:
    """The bytes and the seconds of a refit over the network of `cluster.network`."""

    sent: float  # bytes that a train rank sends, the mean over train ranks
    received: float  # bytes that a generate rank receives
    seconds: float  # without the pause of generation
    limit: str  # the path that sets them


def estimate(recipe: Recipe, shape: ModelShape, weights: float) -> RefitEstimate:
    """Return the estimate of a recipe's refit. weights: bytes of a generate rank's weights, before quantization."""
    cluster, policy = recipe.cluster, recipe.policy
    network, vllm, itemsize = cluster.network, policy.generation.vllm_cfg, PRECISIONS[policy.precision]
    size, count = engine_ranks(vllm), ranks(cluster.generate)
    received, model = weights, float(itemsize * shape.parameters)
    if refits_adapters(recipe):
        stages = of_stages(TrainModel(policy, shape), Parallelism(1), True, uses_megatron(policy))
        received = model = itemsize * sum(stage.adapters.dense for stage in stages)
    engines = [list(range(first, first + size)) for first in range(ranks(cluster.train), ranks(cluster.train) + count, size)]
    nodes, of_engine = node_names(recipe), received * size / ranks(cluster.train)
    groups = sharing_groups(engines, nodes, network, of_engine, received)
    sent, members = of_engine * len(groups), len(engines) / len(groups)
    if policy.generation.refit_transport == "broadcast":
        seconds = broadcast_seconds(model, policy.generation.refit_cfg.bucket_bytes, len(set(nodes.values())), network)
        return RefitEstimate(model / ranks(cluster.train), received, seconds, "broadcast")
    beside = len(engines) / len({tuple(nodes[rank] for rank in engine) for engine in engines})  # engines on the same nodes
    far_in = received / min(members, beside)
    far_out = sent
    if cluster.share_nodes:
        far_in, far_out = (bytes_ * _missing_share(recipe) for bytes_ in (far_in, far_out))
    paths = {
        "train NICs": far_out / network.nic_gb_per_s,
        "generate NICs": far_in / network.nic_gb_per_s,
        "links in nodes": max(received - far_in, sent - far_out) / network.node_gb_per_s,
    }
    limit = max(paths, key=paths.__getitem__)
    rounds = -(-max(received, sent) // policy.generation.refit_cfg.bucket_bytes) + members - 1
    copies = received * (1 - 1 / members) / COPIES_GB_PER_S
    return RefitEstimate(sent, received, (paths[limit] + copies) / GIGA + rounds * LATENCY_US / 1e6, limit)


def broadcast_seconds(total: float, bucket: float, nodes: int, network: NetworkConfig, nics: int = 1) -> float:
    """Return the seconds of a broadcast in buckets by a ring, as in NCCL, in which all links work at once.

    total: bytes. bucket: bytes of a bucket. nodes: number of nodes of the ring, each of which delays a bucket by a latency.
    nics: NICs of a node that the ring uses.
    """
    rate = GIGA * min(nics * network.nic_gb_per_s, network.node_gb_per_s)
    return total / rate + (-(-total // bucket) + nodes - 1) * LATENCY_US / 1e6


def into_node(recipe: Recipe, received: float) -> float:
    """Return the bytes of a refit that enter a node, on which train and generate ranks are, from other nodes.

    received: bytes that a generate rank receives. All nodes of a broadcast receive the model but for an equal part.
    """
    generate = recipe.cluster.generate
    engine = min(engine_ranks(recipe.policy.generation.vllm_cfg), ranks_per_node(generate))
    if recipe.policy.generation.refit_transport == "broadcast":
        return received * engine * (generate.nodes - 1) / generate.nodes
    return received * engine * _missing_share(recipe)


def _missing_share(recipe: Recipe) -> float:
    """Return the share of the model that the train ranks of one node do not hold, 0 to 1."""
    policy, count, near = recipe.policy, ranks(recipe.cluster.train), ranks_per_node(recipe.cluster.train)
    if not uses_megatron(policy):
        return max(0.0, 1 - near * policy.dtensor_cfg.data_parallel_replicate_size / count)
    megatron = policy.megatron_cfg
    experts = megatron.expert_model_parallel_size * expert_tensor_parallel_size(megatron)
    of_stage = count // megatron.pipeline_model_parallel_size  # ranks of a pipeline stage, which have consecutive numbers
    replica = max(megatron.tensor_model_parallel_size, experts)  # ranks that hold a stage together
    return max(0.0, 1 - max(1, near / of_stage) / megatron.pipeline_model_parallel_size * min(1, near / replica))


def node_names(recipe: Recipe) -> dict[int, str]:
    """Return global rank -> name of its node."""
    names, cluster = [], recipe.cluster
    of_generate = "train" if colocated(recipe) or cluster.share_nodes else "generate"
    for realm, component in (("train", cluster.train), (of_generate, cluster.generate)):
        names += [f"{realm} node {rank // ranks_per_node(component)}" for rank in range(ranks(component))]
    return dict(enumerate(names))
