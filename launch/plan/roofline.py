"""Define the rates of a component's ranks, from which all seconds of a plan follow, and the phases of a step.

    matrix products   operations / (the GPU's peak x the share of it that programs reach)
    memory            bytes / (the bandwidth of HBM x its share)
    collectives       bytes / the slowest link of the group
    copies            bytes / (the bandwidth of the link to the host x its share)

The shares are those of recipes/hardware, or measured ones (`gpu_check`). policy.deterministic lengthens the kernels by
published factors, which are not our own measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.plan.rank_division import GIGA
from pipeline.config import PRECISIONS, ComponentConfig, PolicyConfig, Recipe, generates, hardware, trains
from pipeline.config.hardware import GPUSpec

CLOCKS = ("rollout", "train", "refit")
"""Names of the clocks, as in time/<clock> of metrics.jsonl. `step_time.py` combines them into the duration of a step."""
TRAINING_SLOWDOWN = 1.15
"""Factor of a training step with policy.deterministic. docs/developer/determinism/op-catalog.md of Megatron-LM has roughly 15%
of a step, from 4% for a large dense model to 17% for a hybrid mixture of experts. Attention's backward alone may lose 38% of
its speed (https://arxiv.org/abs/2601.21824)."""
GENERATION_SLOWDOWN = 1.5
"""Factor of generation with policy.deterministic, between two measurements of vLLM with batch invariance: 1.45, from 31% less
throughput on an H20 (https://github.com/vllm-project/vllm/issues/27433), and 1.6, from 42 s instead of 26 s in
https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step: its floating-point operations and its duration by part."""

    clock: str  # one of CLOCKS
    name: str
    flops: float  # of all ranks together
    parts: dict[str, float] = field(default_factory=dict)  # seconds of each part; parts do not overlap

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts."""
        return sum(self.parts.values())


def seconds_by_clock(phases: Sequence[Phase]) -> dict[str, float]:
    """Return clock -> seconds of its phases, in the order of CLOCKS, without clocks that have no phase."""
    return {clock: total for clock in CLOCKS if (total := sum(p.seconds for p in phases if p.clock == clock))}


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one rank, and of the links to the other ranks of its component. Ranks are numbered node by node."""

    gpu: GPUSpec
    nic_gb_per_s: float
    island: int  # how many ranks share NVLink (`hardware.nvlink_gpus`)
    itemsize: int = 2  # bytes of an element
    mixture: bool = False  # whether the model has experts
    fp8: bool = False  # whether the linear layers are in FP8
    slowdown: float = 1.0  # of kernels

    @property
    def flops(self) -> float:
        """Return the FLOP/s of matrix products."""
        assumed = self.gpu.assumed
        peak = self.gpu.bf16_tflops if self.itemsize == 2 else self.gpu.fp32_tflops
        share = assumed.mixture_training if self.mixture else assumed.dense_training
        return share * (self.gpu.fp8_tflops if self.fp8 else peak) * 1e12 / self.slowdown

    @property
    def memory(self) -> float:
        """Return the bytes/s of the GPU's memory."""
        return GIGA * self.gpu.hbm_gb_per_s * self.gpu.assumed.bandwidth / self.slowdown

    @property
    def host(self) -> float:
        """Return the bytes/s from host memory while all GPUs of a node copy."""
        return GIGA * self.gpu.host_gb_per_s * self.gpu.assumed.host

    def near(self, size: int, stride: int = 1) -> int:
        """Return how many ranks of a group are connected by NVLink. The group has `size` ranks, `stride` apart."""
        return max(1, min(size, self.island // stride))

    def ring(self, size: int, stride: int = 1) -> float:
        """Return the rate in bytes/s at which each rank of a group sends in a ring of `size` ranks, `stride` apart.

        The group's ranks on one node use their NICs together, as NCCL's rings do.
        """
        near = self.near(size, stride)
        if size <= near:
            return GIGA * self.gpu.nvlink_gb_per_s
        return GIGA * min(self.gpu.nvlink_gb_per_s, near * self.nic_gb_per_s)

    def ring_seconds(self, size: int, count: float, stride: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `count` bytes in total. An all-reduce takes both."""
        return (size - 1) / size * count / self.ring(size, stride) if size > 1 else 0.0

    def exchange_seconds(self, size: int, count: float, stride: int = 1) -> float:
        """Return the seconds of an all-to-all in which each rank sends `count` bytes evenly over the group, itself included."""
        near = self.near(size, stride)
        inside, outside = (near - 1) / size * count, (size - near) / size * count
        return max(inside / self.gpu.nvlink_gb_per_s, outside / self.nic_gb_per_s) / GIGA


def training(recipe: Recipe, policy: PolicyConfig, component: ComponentConfig, gpu: GPUSpec, mixture: bool) -> Rates:
    """Return the rates of the ranks of a component that run a model's train backend."""
    slowdown = TRAINING_SLOWDOWN if policy.deterministic else 1.0
    nic, island = recipe.cluster.network.nic_gb_per_s, hardware.nvlink_gpus(component)
    return Rates(gpu, nic, island, PRECISIONS[policy.precision], mixture, slowdown=slowdown)


def generation(recipe: Recipe, gpu: GPUSpec, mixture: bool) -> Rates:
    """Return the rates of the generate ranks."""
    policy, nic = recipe.policy, recipe.cluster.network.nic_gb_per_s
    fp8 = policy.generation.backend == "vllm" and policy.generation.vllm_cfg.precision == "fp8"
    slowdown = GENERATION_SLOWDOWN if policy.deterministic else 1.0
    return Rates(gpu, nic, hardware.nvlink_gpus(recipe.cluster.generate), PRECISIONS[policy.precision], mixture, fp8, slowdown)


def assumed_slowdown(recipe: Recipe) -> str:
    """Return the plan's line about the factors that it assumes for a recipe with policy.deterministic."""
    factors = [f"{TRAINING_SLOWDOWN:g} times as long in training"] if trains(recipe) else []
    factors += [f"{GENERATION_SLOWDOWN:g} times as long in engines"] if generates(recipe) else []
    return f"policy.deterministic: kernels take {' and '.join(factors)} (sources in launch/plan/roofline.py)"
