"""Estimate memory and transfer times of a GPU that a train rank and a generate rank share in turn.

The turns are those of `pipeline/coordination/colocation.py`. An inactive rank keeps CUDA's context, libraries, NCCL, CUDA
graphs and the refit's staging on the GPU. A reward model on the train ranks computes while the engine is active; its weights
are kept in host memory, so a change of turns does not move them. The float32 main weights of Megatron-Core count as weights
that a refit reads, although they move to the host before the refit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan import gpu_check, memory
from launch.plan.memory_parts import GenerateMemory, TrainMemory, models, rank_batches
from launch.plan.rank_division import GIGA, train_parallelism
from launch.plan.refit import into_node
from launch.plan.roofline import Phase
from pipeline.config import Recipe, ranks_per_node, refits_by_ipc
from pipeline.config.hardware import GPUSpec

TCP_GB_PER_S = 2.5
"""GB/s into a node from others over TCP, which gloo uses: 20 Gbit/s. Assumed, not measured."""
MOVED = ("weights", "merged weights", "optimizer", "other models")
"""Parts of a train rank that move to the host and back; gradients are freed."""


@dataclass(frozen=True, slots=True)
class TurnMemory:
    """The bytes that a train rank and a generate rank take on their GPU in one turn."""

    name: str
    train: float
    generate: float

    @property
    def total(self) -> float:
        """Return the bytes of both ranks."""
        return self.train + self.generate


def turns(recipe: Recipe, train: TrainMemory, generate: GenerateMemory) -> tuple[TurnMemory, ...]:
    """Return the memory of a GPU in each turn, in the order of a step."""
    staging = memory.staging(recipe, train.shapes["policy"], train_parallelism(recipe.policy, recipe.cluster.train))
    away = train.parts.get("runtime", 0.0) + staging
    # With adapters a refit reads only the merged weights, since the other weights are on the host.
    read = train.parts.get("merged weights", train.parts.get("weights", 0.0))
    return (
        TurnMemory("rollout", away + _scoring(recipe, train), generate.total),
        TurnMemory("training", train.total, asleep(generate)),
        TurnMemory("refit", away + read, asleep(generate) + generate.parts.get("weights", 0.0)),
    )


def asleep(generate: GenerateMemory) -> float:
    """Return the bytes of a generate rank on its GPU while the train rank is active."""
    return generate.parts.get("runtime", 0.0) + generate.parts.get("buffers", 0.0)


def _scoring(recipe: Recipe, train: TrainMemory) -> float:
    """Return the peak bytes of a train rank while the reward model on the train ranks scores; 0 without such a model."""
    judges = [model for model in models(recipe, train.shapes) if model.values and not model.trained]
    layout = train_parallelism(recipe.policy, recipe.cluster.train)
    return memory.peak(judges, layout, True, rank_batches(recipe, layout.data)).total if judges else 0.0


def host(recipe: Recipe, train: TrainMemory, generate: GenerateMemory) -> float:
    """Return the bytes of host memory of the two ranks that share a GPU, including offloaded models."""
    return train.host + _moved_bytes(train) + _kept_bytes(recipe, generate)


def _moved_bytes(train: TrainMemory) -> float:
    return sum(train.parts.get(name, 0.0) for name in MOVED)


def _kept_bytes(recipe: Recipe, generate: GenerateMemory) -> float:
    """Return the bytes of weights that a sleeping engine keeps on the host: all of its weights for a delta refit, else 0."""
    return generate.parts.get("weights", 0.0) if recipe.policy.generation.refit_transport == "delta" else 0.0


def phases(recipe: Recipe, train: TrainMemory, generate: GenerateMemory) -> Iterator[Phase]:
    """Yield the phases of a step in which the ranks that share GPUs change turns."""
    seconds = (_moved_bytes(train) + _kept_bytes(recipe, generate)) / _rate(recipe)
    yield Phase("train", "the trainer takes the GPUs", 0.0, {"copies from and to the host": seconds})
    yield Phase("refit", "the engines take the GPUs", 0.0, {"copies from and to the host": seconds})


def refit(recipe: Recipe, received: float) -> Phase:
    """Return the phase in which weights reach the engines: by CUDA IPC between ranks on one GPU, or else through host memory.

    NCCL is not used, because it cannot connect two ranks on one GPU. received: the bytes that a generate rank receives.
    """
    across = into_node(recipe, received)
    far = across / ranks_per_node(recipe.cluster.generate)
    near, by_ipc, assumed = received - far, refits_by_ipc(recipe), _gpu(recipe).assumed
    parts = {"CUDA IPC": near / (assumed.ipc_gb_per_s * GIGA)} if by_ipc else {"gloo": near / (assumed.gloo_gb_per_s * GIGA)}
    if by_host := far if by_ipc else received:
        parts["to and from the host"] = 2 * by_host / _rate(recipe)
    if across:
        parts["gloo between nodes"] = across / (TCP_GB_PER_S * GIGA)
    return Phase("refit", "weights to the engines", 0.0, parts)


def _rate(recipe: Recipe) -> float:
    """Return the rate in bytes/s of copies between a GPU and page-locked host memory."""
    return _gpu(recipe).assumed.page_locked * GIGA * _gpu(recipe).host_gb_per_s


def _gpu(recipe: Recipe) -> GPUSpec:
    return gpu_check.gpu(recipe, recipe.cluster.train)


def assumed_rates(recipe: Recipe) -> str:
    """Return a text with the assumed transfer rates of shared GPUs, for the plan's table."""
    gpu = _gpu(recipe)
    by_ipc = refits_by_ipc(recipe)
    between = (
        f" and {TCP_GB_PER_S:g} GB/s between nodes, on the interface of GLOO_SOCKET_IFNAME"
        if recipe.cluster.train.nodes > 1
        else ""
    )
    rate, way = (gpu.assumed.ipc_gb_per_s, "CUDA IPC") if by_ipc else (gpu.assumed.gloo_gb_per_s, "host memory")
    return (
        f"ranks that share a GPU: page-locked copies reach {gpu.assumed.page_locked:.0%} of the host link's"
        f" {gpu.host_gb_per_s:g} GB/s, a refit reaches {rate:.3g} GB/s per rank by {way}{between};"
        " the time in which an engine sleeps and wakes is not counted"
    )
