"""Estimate the time of a step on the train ranks: log-probs, the reference, the critic and the teacher, then updates.

Matrix products run at an assumed fraction of the peak. The time of communication is its bytes over the rate of the group's
links. "Exposed" communication does not overlap with computation:
    tensor     two all-reduces a layer of the tokens' hidden states, or an equivalent all-gather and reduce-scatter; exposed
    context    all-gather of a layer's keys and values; exposed
    expert     all-to-all of tokens to their experts and back, twice a layer; exposed
    pipeline   hidden states from stage to stage; and the bubble of 1F1B, (stages - 1) / microbatches of the work (Narayanan et
               al. 2021, arXiv 2104.04473, section 2.2)
    gradients  Megatron-Core: one reduction an update, which overlaps with the last microbatch's backward pass if
               overlap_grad_reduce is set; then an exposed all-gather of updated weights
    weights    FSDP2: an all-gather of a layer's weights in each forward and backward pass of a microbatch, and a reduce-scatter
               of its gradients, with an all-reduce over replicas; these overlap with the pass

Not counted: unequal microbatches, latencies, imbalance between data ranks, packing on the CPU, gradient clipping, an optimizer
in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from launch.plan import deterministic_cost
from launch.plan.activations import whole_mixers
from launch.plan.lengths import Lengths
from launch.plan.phase import Phase
from launch.plan.rank_division import GIGA, Links, Parallelism, train_parallelism
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import PRECISIONS, ComponentConfig, PolicyConfig, Recipe, hardware, uses_megatron
from pipeline.config.hardware import GPUSpec
from pipeline.models import flops
from pipeline.models.shape import ModelShape

OPTIMIZER_BYTES = 30
"""Bytes that an update moves for each parameter. It reads the float32 weight, gradient and two moments, and writes the weight,
the moments and a copy of the weight in bfloat16. Counted, not measured."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model on the ranks of a component, with the assumed lengths of the sequences that it processes."""

    shape: ModelShape
    policy: PolicyConfig
    layout: Parallelism
    links: Links
    lengths: Lengths
    head: bool = True  # whether it has an output layer, not one value per token
    frozen: bool = False  # whether its weights are in the policy's precision, not in float32 for training

    @property
    def gpu(self) -> GPUSpec:
        """Return the GPU of each rank."""
        return self.links.gpu

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element in the policy's precision."""
        return PRECISIONS[self.policy.precision]

    @property
    def rate(self) -> float:
        """Return the FLOP/s of a rank's matrix products."""
        assumed = self.gpu.assumed
        share = assumed.mixture_training if self.shape.experts else assumed.dense_training
        peak = self.gpu.fp32_tflops if self.policy.precision == "float32" else self.gpu.bf16_tflops
        return share * peak * 1e12 / deterministic_cost.training(self.policy)

    def forward_flops(self, count: float) -> float:
        """Return the number of floating-point operations of a forward pass of `count` sequences."""
        lengths = self.lengths
        total = flops.forward(self.shape, count * lengths.sequence, count * lengths.squared_sequence / 2)
        return total if self.head else total - 2 * self.shape.vocabulary * self.shape.hidden * count * lengths.sequence

    def microbatches(self, count: float, tokens: int, size: int) -> int:
        """Return a data rank's number of microbatches if all ranks together process `count` sequences.

        tokens: the tokens of a microbatch with packing. size: its sequences without packing.
        """
        sequences = count / self.layout.data
        if self.policy.sequence_packing.enabled:
            return max(1, math.ceil(sequences * self.lengths.sequence / tokens))
        return max(1, math.ceil(sequences / size))


def job(
    recipe: Recipe, policy: PolicyConfig, shape: ModelShape, lengths: Lengths, gpu: GPUSpec, component: ComponentConfig
) -> Job:
    """Return a model's Job on the ranks of a component."""
    links = Links(gpu, recipe.cluster.network.nic_gb_per_s, hardware.nvlink_gpus(component))
    return Job(shape, policy, train_parallelism(policy, component), links, lengths)


# ---- one pass over some sequences ---------------------------------------------------------------------------------------


def forward_pass(job: Job, count: float) -> tuple[float, dict[str, float]]:
    """Return (FLOPs of all ranks, part -> seconds of a rank) for the log-probs or values of `count` sequences."""
    packing = job.policy.sequence_packing
    microbatches = job.microbatches(count, packing.logprob_mb_tokens, job.policy.logprob_batch_size)
    work = job.forward_flops(count)
    return work, _pass(job, count, microbatches, forward=work, backward=0.0, passes=1)


def update(job: Job, count: float) -> tuple[float, dict[str, float]]:
    """Return (FLOPs of all ranks, part -> seconds of a rank) for one optimizer step on `count` sequences."""
    packing = job.policy.sequence_packing
    microbatches = job.microbatches(count, packing.train_tokens, job.policy.train_micro_batch_size)
    forward = job.forward_flops(count)
    again = recomputed_share(job, count)
    lora = config.adapters(job.policy)
    backward = (1 if lora else 2) * forward + again * forward  # with LoRA, frozen weights need no gradient
    layers = flops.recomputed_share(job.policy, job.shape, job.layout.pipeline, 0.0)
    parts = _pass(job, count, microbatches, forward, backward, passes=2 + layers)
    if not lora:
        parts |= _gradients(job, parts.get("matrix products", 0.0) * 2 / 3 / microbatches)
    return forward + backward, parts


def recomputed_share(job: Job, count: float) -> float:
    """Return the share of the forward pass's FLOPs that the backward pass recomputes."""
    attention = flops.attention(job.shape, count * job.lengths.squared_sequence / 2)
    return flops.recomputed_share(job.policy, job.shape, job.layout.pipeline, attention / job.forward_flops(count))


def _pass(job: Job, count: float, microbatches: int, forward: float, backward: float, passes: float) -> dict[str, float]:
    products = [work / (job.layout.ranks * job.rate) for work in (forward, backward)]
    waited = _waited_for(job, count, passes)
    if not uses_megatron(job.policy):
        seconds = sum(products) + sum(waited.values())
        weights = _fsdp_weights(job, microbatches, products, sum(waited.values()))
        return {"matrix products": sum(products)} | waited | ({"weights": weights - seconds} if weights > seconds else {})
    parts = {"matrix products": sum(products)} | waited
    if job.layout.pipeline > 1:
        parts["pipeline bubble"] = sum(parts.values()) * (job.layout.pipeline - 1) / microbatches
        parts["pipeline transfers"] = _stage_transfers(job, count, 2 if backward else 1)
    return parts


def _waited_for(job: Job, count: float, passes: float) -> dict[str, float]:
    """Return part -> seconds of the exposed communication within layers.

    passes: the number of passes over the layers: forward, backward, and the recomputed share of another forward pass.
    """
    shape, layout, links = job.shape, job.layout, job.links
    stage = 1 / layout.pipeline
    tokens = count * job.lengths.sequence / layout.data  # tokens of a data rank
    hidden = tokens / layout.context * shape.hidden * job.itemsize
    parts = {}
    if layout.tensor > 1:
        sparse = 2.0 if layout.expert_tensor > 1 else 1.0
        if layout.expert > 1 and not layout.sequence and not uses_megatron(job.policy):
            sparse += 0.5  # the outputs of experts, whose tokens are split, are gathered
        reduces = shape.attention_layers + shape.state_layers + shape.mlp_layers + (sparse - 1) * shape.sparse_layers
        parts["tensor parallelism"] = passes * stage * reduces * 2 * links.ring_seconds(layout.tensor, hidden)
    if layout.context > 1:
        keys = shape.heads if shape.latent else shape.kv_heads
        numbers = keys * (shape.head_dim + shape.value_dim) / layout.tensor
        gathered = links.ring_seconds(layout.context, tokens * numbers * job.itemsize, layout.tensor)
        parts["context parallelism"] = passes * stage * shape.attention_layers * gathered
    if layout.expert > 1:
        splits_tokens = layout.sequence or not uses_megatron(job.policy)  # over tensor-parallel ranks
        sent_bytes = hidden / (layout.tensor if splits_tokens else 1) * shape.experts_per_token
        exchange = links.exchange_seconds(layout.expert, sent_bytes, layout.expert_tensor)
        parts["expert parallelism"] = passes * stage * shape.sparse_layers * 2 * exchange
    return parts


def _stage_transfers(job: Job, count: float, directions: int) -> float:
    layout = job.layout
    tokens = count * job.lengths.sequence / layout.data / layout.context / (layout.tensor if layout.sequence else 1)
    near = layout.ranks // layout.pipeline < job.links.island
    rate = job.gpu.nvlink_gb_per_s if near else job.links.nic_gb_per_s
    return directions * tokens * job.shape.hidden * job.itemsize / (GIGA * rate)


def _fsdp_weights(job: Job, microbatches: int, products: list[float], tensor: float) -> float:
    """Return the seconds of all microbatches with FSDP2, whose gathers and reduce-scatters overlap with the passes.

    products: seconds of matrix products in (all forward passes, all backward passes). tensor: seconds of exposed communication.
    """
    shape, layout, links = job.shape, job.layout, job.links
    undivided = shape.layers * whole_mixers(shape, layout.sequence)
    groups = (  # numbers, ranks that shard them, and how far apart these are
        ((shape.parameters - shape.routed - undivided) / layout.tensor + undivided, layout.shard, layout.tensor),
        (layout.gathered_experts(shape), layout.expert_shard, layout.expert),
    )
    gather, scatter = 0.0, 0.0
    for numbers, size, stride in groups:
        gather += links.ring_seconds(size, numbers * job.itemsize, stride)
        scatter += links.ring_seconds(size, numbers * 4, stride)  # gradients are float32
        scatter += 2 * links.ring_seconds(layout.replicas, numbers * 4 / size, layout.ranks // layout.replicas)
        if job.policy.dtensor_cfg.cpu_offload:
            gather += numbers * (job.itemsize if job.frozen else 4) / size / _host(job)
            scatter += numbers * 4 / size / _host(job)
    forward, backward = (work / microbatches for work in products)
    talk = tensor / microbatches / (2 if backward else 1)
    total = max(forward + talk, gather)
    if backward:
        total += max(backward + talk, gather + scatter)
    return microbatches * total


def _gradients(job: Job, hidden_by: float) -> dict[str, float]:
    """Return part -> seconds of the optimizer and, with Megatron-Core, of reducing gradients and gathering updated weights.

    hidden_by: seconds of the last microbatch's backward pass, with which the reduction may overlap.
    """
    layout, links = job.layout, job.links
    groups = (
        (layout.data * layout.context, layout.tensor),
        (layout.expert_data, layout.expert * layout.expert_tensor),
    )
    parameters = layout.parameters_of_rank(job.shape)
    bandwidth = GIGA * job.gpu.hbm_gb_per_s * job.gpu.assumed.bandwidth
    if not uses_megatron(job.policy):
        numbers = job.shape.parameters + (layout.tensor - 1) * job.shape.layers * whole_mixers(job.shape, layout.sequence)
        return {"optimizer": numbers * layout.replicas / layout.ranks * OPTIMIZER_BYTES / bandwidth}
    ddp = job.policy.megatron_cfg.distributed_data_parallel_config
    itemsize = 4 if ddp.grad_reduce_in_fp32 else job.itemsize
    reduce, gather, optimizer = 0.0, 0.0, 0.0
    for numbers, (size, stride) in zip(parameters, groups, strict=True):
        reduce += links.ring_seconds(size, numbers * itemsize, stride)
        gather += links.ring_seconds(size, numbers * job.itemsize, stride)
        optimizer += numbers / size * OPTIMIZER_BYTES / bandwidth
    exposed = max(0.0, reduce - hidden_by) if ddp.overlap_grad_reduce else reduce
    return {"gradients": exposed, "gathering weights": gather, "optimizer": optimizer}


# ---- a step ---------------------------------------------------------------------------------------------------------------


def phases(recipe: Recipe, shapes: Mapping[str, ModelShape], lengths: Lengths, gpu: GPUSpec) -> list[Phase]:
    """Return the phases of a step on the train ranks, in order."""
    component, models = recipe.cluster.train, config.models(recipe)
    jobs = {name: job(recipe, policy, shapes[name], lengths, gpu, component) for name, policy in models.items()}
    algorithm, policy = build(recipe), jobs["policy"]
    count = algorithm.samples_per_step
    step_phases = []
    if algorithm.needs.old:
        work = forward_pass(policy, algorithm.old_share * count)
        step_phases.append(Phase("train", "log-probs before the updates", *work))
    if algorithm.needs.reference:
        work, parts = forward_pass(replace(policy, frozen=True), count)
        step_phases.append(Phase("train", "log-probs of the reference", work, parts | _reference_fetched(policy)))
    if "value" in jobs:
        jobs["value"] = _without_head(jobs["value"])
        step_phases.append(Phase("train", "values of the critic", *forward_pass(jobs["value"], count)))
    step_phases += _teacher_phases(recipe, jobs, count)
    if algorithm.needs.head == "values":
        policy = _without_head(policy)
    update_count = algorithm.updates_per_step
    samples = recipe.policy.train_global_batch_size * algorithm.sequences_per_item
    for name, trained in (("policy", policy), ("critic", jobs.get("value"))):
        if trained is not None:
            work, parts = update(trained, samples)
            step_phases.append(
                Phase(
                    "train",
                    f"{update_count} update{'s' * (update_count > 1)} of the {name}",
                    update_count * work,
                    {k: update_count * v for k, v in parts.items()},
                )
            )
    return step_phases


def _teacher_phases(recipe: Recipe, jobs: Mapping[str, Job], count: float) -> Iterator[Phase]:
    """Yield the forward pass of each teacher. Several teachers are assumed to score equal numbers of samples."""
    teachers, scores = config.teachers(recipe), "top k" if build(recipe).needs.teacher_top_k else "log-probs"
    for name, teacher in teachers.items():
        if (of_teacher := jobs.get(config.teacher_section(name))) is not None:
            work, parts = forward_pass(of_teacher, count / len(teachers))
            label = f"{scores} of the teacher {name}" if name else f"the teacher's {scores}"
            yield Phase("train", label, work, parts | _host_copies(of_teacher, teacher.cpu_offload))


def reward_phase(
    recipe: Recipe, shapes: Mapping[str, ModelShape], lengths: Lengths, gpu: GPUSpec, count: float
) -> Phase | None:
    """Return the phase in which the reward model scores `count` answers; None without a reward model."""
    name = config.reward_environment(recipe)
    if name is None:
        return None
    served = config.serves_rewards(recipe)
    component = recipe.cluster.reward if served else recipe.cluster.train
    judge = _without_head(job(recipe, config.reward_model_policy(recipe), shapes[f"env.{name}"], lengths, gpu, component))
    work, parts = forward_pass(judge, count)
    return Phase(
        "rollout", "scores of the reward model", work, parts | _host_copies(judge, not served and recipe.env[name].cpu_offload)
    )


def _without_head(job: Job) -> Job:
    return replace(job, head=False)


def _reference_fetched(job: Job) -> dict[str, float]:
    """Return part -> seconds of copying the reference's weights from the host to the GPU; empty if nothing is copied.

    With cpu_offload, FSDP2 copies nothing here, since each microbatch gathers the weights from the host (`_fsdp_weights`). With
    adapters the reference is the base model, which is on the GPU.
    """
    if config.adapters(job.policy):
        return {}
    dtensor = job.policy.dtensor_cfg
    return _host_copies(job, uses_megatron(job.policy) or (dtensor.reference_cpu_offload and not dtensor.cpu_offload))


def _host_copies(job: Job, offloaded: bool) -> dict[str, float]:
    """Return part -> seconds of copying weights from host memory; empty if they are not `offloaded`."""
    if not offloaded:
        return {}
    parameters = (
        sum(job.layout.parameters_of_rank(job.shape)) if uses_megatron(job.policy) else job.shape.parameters / job.layout.ranks
    )
    return {"host copies": job.itemsize * parameters / _host(job)}


def _host(job: Job) -> float:
    return GIGA * job.gpu.host_gb_per_s * job.gpu.assumed.host
