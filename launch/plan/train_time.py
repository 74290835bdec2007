"""Estimate the time of a step on the train ranks: log-probs, the reference, the critic and the teacher, then updates.

"Exposed" communication does not overlap with computation:
    tensor     two all-reduces a layer of the tokens' hidden states, or an equivalent all-gather and reduce-scatter; exposed
    context    all-gather of a layer's keys and values; exposed
    expert     all-to-all of tokens to their experts and back, twice a layer; exposed
    pipeline   hidden states from stage to stage; and the bubble of 1F1B, (stages - 1) / microbatches of the work (Narayanan et
               al. 2021, arXiv 2104.04473, section 2.2)
    gradients  Megatron-Core: one reduction an update, which overlaps with the last microbatch's backward pass if
               overlap_grad_reduce is set; then an exposed all-gather of updated weights
    weights    FSDP2: an all-gather of the weights in each forward and backward pass of a microbatch, and a reduce-scatter of
               the gradients, with an all-reduce over replicas; these overlap with the pass

Not counted: unequal microbatches, latencies, imbalance between data ranks, packing on the CPU, gradient clipping, an optimizer
in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from launch.plan import roofline
from launch.plan.activations import whole_mixers
from launch.plan.lengths import Lengths
from launch.plan.rank_division import GIGA, Parallelism, train_parallelism
from launch.plan.rank_memory import NOT_MATRICES
from launch.plan.roofline import Phase, Rates
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import ComponentConfig, PolicyConfig, Recipe, uses_megatron
from pipeline.config.hardware import GPUSpec
from pipeline.models import flops
from pipeline.models.shape import ModelShape

OPTIMIZER_BYTES = 30
"""Bytes that an update moves for each parameter. It reads the float32 weight, gradient and two moments, and writes the weight,
the moments and a copy of the weight in bfloat16. Counted, not measured."""
Work = tuple[float, dict[str, float]]
"""FLOPs of all ranks, and part -> seconds of a rank."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model on the ranks of a component, with the assumed lengths of the sequences that it processes."""

    shape: ModelShape
    policy: PolicyConfig
    layout: Parallelism
    rates: Rates
    lengths: Lengths
    head: bool = True  # whether it has an output layer, not one value per token
    frozen: bool = False  # whether its weights are in the policy's precision, not in float32 for training

    @property
    def whole(self) -> float:
        """Return the number of parameters that FSDP2's tensor parallelism leaves whole on every rank."""
        return self.shape.layers * whole_mixers(self.shape, self.layout.sequence)

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
    rates = roofline.training(recipe, policy, component, gpu, shape.experts > 0)
    return Job(shape, policy, train_parallelism(policy, component), rates, lengths)


# ---- one pass over some sequences ---------------------------------------------------------------------------------------


def forward_pass(job: Job, count: float) -> Work:
    """Return the work for the log-probs or values of `count` sequences."""
    packing = job.policy.sequence_packing
    microbatches = job.microbatches(count, packing.logprob_mb_tokens, job.policy.logprob_batch_size)
    work = job.forward_flops(count)
    return work, _pass(job, count, microbatches, forward=work, backward=0.0, passes=1)


def update(job: Job, count: float) -> Work:
    """Return the work of one optimizer step on `count` sequences."""
    packing, stages = job.policy.sequence_packing, job.layout.pipeline
    microbatches = job.microbatches(count, packing.train_tokens, job.policy.train_micro_batch_size)
    forward = job.forward_flops(count)
    attention = flops.attention(job.shape, count * job.lengths.squared_sequence / 2) / forward
    lora = config.adapters(job.policy)
    backward = forward * ((1 if lora else 2) + flops.recomputed_share(job.policy, job.shape, stages, attention))
    layers = flops.recomputed_share(job.policy, job.shape, stages, 0.0)
    parts = _pass(job, count, microbatches, forward, backward, passes=2 + layers)
    if not lora:  # with LoRA, frozen weights need no gradient
        parts |= _gradients(job, parts.get("matrix products", 0.0) * 2 / 3 / microbatches)
    return forward + backward, parts


def _pass(job: Job, count: float, microbatches: int, forward: float, backward: float, passes: float) -> dict[str, float]:
    products = [work / (job.layout.ranks * job.rates.flops) for work in (forward, backward)]
    exposed = _exposed(job, count, passes)
    parts = {"matrix products": sum(products)} | exposed
    seconds = sum(parts.values())
    if not uses_megatron(job.policy):
        weights = _fsdp_weights(job, microbatches, products, sum(exposed.values()))
        return parts | ({"weights": weights - seconds} if weights > seconds else {})
    if job.layout.pipeline > 1:
        parts["pipeline bubble"] = seconds * (job.layout.pipeline - 1) / microbatches
        parts["pipeline transfers"] = _stage_transfers(job, count, 2 if backward else 1)
    return parts


def _exposed(job: Job, count: float, passes: float) -> dict[str, float]:
    """Return part -> seconds of the exposed communication within layers.

    passes: the number of passes over the layers: forward, backward, and the recomputed share of another forward pass.
    """
    shape, layout, rates = job.shape, job.layout, job.rates
    times = passes / layout.pipeline
    tokens = count * job.lengths.sequence / layout.data  # tokens of a data rank
    hidden = tokens / layout.context * shape.hidden * rates.itemsize
    parts = {}
    if layout.tensor > 1:
        sparse = 2.0 if layout.expert_tensor > 1 else 1.0
        if layout.expert > 1 and not layout.sequence and not uses_megatron(job.policy):
            sparse += 0.5  # the outputs of experts, whose tokens are split, are gathered
        reduces = shape.attention_layers + shape.state_layers + shape.mlp_layers + (sparse - 1) * shape.sparse_layers
        parts["tensor parallelism"] = times * reduces * 2 * rates.ring_seconds(layout.tensor, hidden)
    if layout.context > 1:
        keys = shape.heads if shape.latent else shape.kv_heads
        numbers = keys * (shape.head_dim + shape.value_dim) / layout.tensor
        gathered = rates.ring_seconds(layout.context, tokens * numbers * rates.itemsize, layout.tensor)
        parts["context parallelism"] = times * shape.attention_layers * gathered
    if layout.expert > 1:
        splits_tokens = layout.sequence or not uses_megatron(job.policy)  # over tensor-parallel ranks
        sent_bytes = hidden / (layout.tensor if splits_tokens else 1) * shape.experts_per_token
        exchange = rates.exchange_seconds(layout.expert, sent_bytes, layout.expert_tensor)
        parts["expert parallelism"] = times * shape.sparse_layers * 2 * exchange
    return parts


def _stage_transfers(job: Job, count: float, directions: int) -> float:
    layout = job.layout
    tokens = count * job.lengths.sequence / layout.data / layout.context / (layout.tensor if layout.sequence else 1)
    near = layout.ranks // layout.pipeline < job.rates.island
    rate = job.rates.gpu.nvlink_gb_per_s if near else job.rates.nic_gb_per_s
    return directions * tokens * job.shape.hidden * job.rates.itemsize / (GIGA * rate)


def _fsdp_weights(job: Job, microbatches: int, products: list[float], exposed: float) -> float:
    """Return the seconds of all microbatches with FSDP2, whose gathers and reduce-scatters overlap with the passes.

    products: seconds of matrix products in (all forward passes, all backward passes).
    """
    shape, layout, rates = job.shape, job.layout, job.rates
    groups = (  # numbers, ranks that shard them, and how far apart these are
        ((shape.parameters - shape.routed - job.whole) / layout.tensor + job.whole, layout.shard, layout.tensor),
        (layout.gathered_experts(shape), layout.expert_shard, layout.expert),
    )
    gather, scatter = 0.0, 0.0
    for numbers, size, stride in groups:
        gather += rates.ring_seconds(size, numbers * rates.itemsize, stride)
        scatter += rates.ring_seconds(size, numbers * 4, stride)  # gradients are float32
        scatter += 2 * rates.ring_seconds(layout.replicas, numbers * 4 / size, layout.ranks // layout.replicas)
        if job.policy.dtensor_cfg.cpu_offload:
            gather += numbers * (rates.itemsize if job.frozen else 4) / size / rates.host
            scatter += numbers * 4 / size / rates.host
    forward, backward = (work / microbatches for work in products)
    talk = exposed / microbatches / (2 if backward else 1)
    total = max(forward + talk, gather) + (max(backward + talk, gather + scatter) if backward else 0.0)
    return microbatches * total


def _gradients(job: Job, hidden_by: float) -> dict[str, float]:
    """Return part -> seconds of the optimizer and, with Megatron-Core, of reducing gradients and gathering updated weights.

    hidden_by: seconds of the last microbatch's backward pass, with which the reduction may overlap.
    """
    layout, rates = job.layout, job.rates
    if not uses_megatron(job.policy):
        numbers = job.shape.parameters + (layout.tensor - 1) * job.whole
        update = numbers * layout.replicas / layout.ranks * OPTIMIZER_BYTES / rates.memory
        return {"optimizer": update + (_muon_seconds(job) if job.policy.optimizer.name == "torch.optim.Muon" else 0.0)}
    groups = ((layout.data * layout.context, layout.tensor), (layout.expert_data, layout.expert * layout.expert_tensor))
    ddp = job.policy.megatron_cfg.distributed_data_parallel_config
    itemsize = 4 if ddp.grad_reduce_in_fp32 else rates.itemsize
    reduce, gather, optimizer = 0.0, 0.0, 0.0
    for numbers, (size, stride) in zip(layout.parameters_of_rank(job.shape), groups, strict=True):
        reduce += rates.ring_seconds(size, numbers * itemsize, stride)
        gather += rates.ring_seconds(size, numbers * rates.itemsize, stride)
        optimizer += numbers / size * OPTIMIZER_BYTES / rates.memory
    exposed = max(0.0, reduce - hidden_by) if ddp.overlap_grad_reduce else reduce
    return {"gradients": exposed, "gathering weights": gather, "optimizer": optimizer}


def _muon_seconds(job: Job) -> float:
    """Return the seconds in which the ranks of a replica orthogonalize all matrices, and exchange them in bfloat16.

    An iteration on a matrix of m rows and n columns, m <= n, takes 4 m^2 n + 2 m^3 FLOPs (`optim.Muon`). Owners are assumed to
    have equal work.
    """
    ranks, rates = job.layout.ranks / job.layout.replicas, replace(job.rates, itemsize=2, fp8=False)
    shapes = [tensor.shape for tensor in job.shape.tensors if tensor.part not in NOT_MATRICES and len(tensor.shape) > 1]
    work = sum(math.prod(shape) * min(shape[-2:]) * (4 + 2 * min(shape[-2:]) / max(shape[-2:])) for shape in shapes)
    held = 2 * sum(map(math.prod, shapes)) / ranks  # bytes of a rank's parts
    steps = job.policy.optimizer.kwargs.get("ns_steps", 5)
    return steps * work / (ranks * rates.flops) + 2 * rates.exchange_seconds(int(ranks), held)


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
    if algorithm.needs.mismatched:
        step_phases.append(Phase("train", "log-probs of mismatched answers", *forward_pass(policy, count)))
    if algorithm.needs.reference:
        work, parts = forward_pass(replace(policy, frozen=True), count * (1 + algorithm.needs.mismatched))
        step_phases.append(Phase("train", "log-probs of the reference", work, parts | _reference_fetched(policy)))
    critic = replace(jobs["value"], head=False) if "value" in jobs else None
    if critic:
        step_phases.append(Phase("train", "values of the critic", *forward_pass(critic, count)))
    step_phases += _teacher_phases(recipe, jobs, count)
    if algorithm.needs.own_top_k:
        step_phases.append(Phase("train", "top k of the policy", *forward_pass(policy, count)))
    if algorithm.needs.head == "values":
        policy = replace(policy, head=False)
    times = algorithm.updates_per_step
    samples = recipe.policy.train_global_batch_size * algorithm.sequences_per_item
    for name, trained in (("policy", policy), ("critic", critic)):
        if trained is not None:
            work, parts = update(trained, samples)
            label = f"{times} update{'s' * (times > 1)} of the {name}"
            step_phases.append(Phase("train", label, times * work, {part: times * took for part, took in parts.items()}))
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
    judge = job(recipe, config.reward_model_policy(recipe), shapes[f"env.{name}"], lengths, gpu, component)
    work, parts = forward_pass(replace(judge, head=False), count)
    copies = _host_copies(judge, not served and recipe.env[name].cpu_offload)
    return Phase("rollout", "scores of the reward model", work, parts | copies)


def _reference_fetched(job: Job) -> dict[str, float]:
    """Return part -> seconds of copying the reference's weights from the host to the GPU; empty if nothing is copied.

    With cpu_offload, FSDP2 copies nothing here, since each microbatch gathers the weights from the host (`_fsdp_weights`). With
    adapters the reference is the base model, which is on the GPU.
    """
    dtensor = job.policy.dtensor_cfg
    offloaded = uses_megatron(job.policy) or (dtensor.reference_cpu_offload and not dtensor.cpu_offload)
    return _host_copies(job, offloaded and not config.adapters(job.policy))


def _host_copies(job: Job, offloaded: bool) -> dict[str, float]:
    """Return part -> seconds of copying weights from host memory; empty if they are not `offloaded`."""
    if not offloaded:
        return {}
    of_rank = sum(job.layout.parameters_of_rank(job.shape)) if uses_megatron(job.policy) else None
    parameters = job.shape.parameters / job.layout.ranks if of_rank is None else of_rank
    return {"host copies": job.rates.itemsize * parameters / job.rates.host}
