"""Define the reported parts of a rank's memory, and the models and microbatches that determine them.

Microbatches are assumed to be as full as the recipe and the longest sequence of its data allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.preflight.tried_optimizers import optimizers, try_on_this_machine
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import PRECISIONS, OptimizerConfig, PolicyConfig, Recipe
from pipeline.models.shape import ModelShape
from pipeline.train.adapters.spec import refits_adapters

Parts = dict[str, float]
"""Name in PARTS -> bytes."""
PARTS = (
    "weights",  # the policy's weights, with float32 main weights
    "merged weights",  # W + BA of a policy with adapters, which a refit of whole weights or an export reads
    "gradients",  # those that are accumulated between microbatches
    "optimizer",  # its state, such as Adam's two moments
    "activations",  # saved for the backward pass, and the workspace of one layer
    "logits",  # logits of a chunk, with the workspace of the softmax and its gradient
    "buffers",  # gathered weights, gradients being reduced, staging of the refit, the step's packed batches
    "other models",  # critic, teacher, reward model, the reference policy (Megatron-Core: on a CPU rank)
    "KV cache",
    "runtime",  # on a GPU: CUDA context, workspaces of libraries, NCCL, CUDA graphs
)
RUNTIME = 2.0 * 2**30
"""Bytes of a GPU's memory outside of tensors: an assumed total for CUDA's context, NCCL and the libraries' workspaces. CUDA's
context takes 0.3 to 0.5 GiB (PyTorch issues 107667 and 81257), and NCCL takes 10 MB for each channel and neighbour of a
communicator."""
TOKEN_BYTES = 8 + 8 + 1 + 4 + 4  # bytes a token: token, position, mask, log-prob, advantage (pipeline.types.PackedBatch)
FIELD_BYTES = 4  # likewise of each value that a forward pass adds: old or reference log-prob, value (pipeline.types)
TEACHER_BYTES = 8 + 4  # for each of the teacher's K tokens at each position: token, log-prob (pipeline.types)


ADAM_BYTES = (8.0, 8.0)
"""Bytes per element of (matrices, other parameters): the two float32 moments of `optim.AdamW`."""


@dataclass(frozen=True)
class TrainMemory:
    """Memory of the fullest train rank in its fullest phase."""

    parts: Parts
    phase: str  # the fullest one
    phases: Mapping[str, float]  # bytes of each phase
    host: float  # bytes of host memory per rank: reference weights, offloaded state
    assumptions: tuple[str, ...]
    shapes: Mapping[str, ModelShape]  # of the models it is counted from

    @property
    def total(self) -> float:
        """Return the bytes of all parts, on the GPU."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class GenerateMemory:
    """Memory of the fullest generate rank."""

    parts: Parts
    received: float  # bytes of weights that the rank receives in a refit, before quantization
    exact: bool  # whether the bytes of weights are exact; else an upper bound
    tokens: float  # capacity of an engine's KV cache; 0 or less: the weights leave no room
    sequences: float  # sequences of max_model_len that fit at once; `engine_sizes` bounds those that run
    assumptions: tuple[str, ...]
    shape: ModelShape  # of the model it is counted from
    state_tokens: float = 0.0  # tokens of KV cache that take as many bytes as the state-space mixers' states of a sequence

    @property
    def total(self) -> float:
        """Return the bytes of all parts, on the GPU."""
        return sum(self.parts.values())

    def holds(self, length: float) -> float:
        """Return how many sequences of `length` tokens the KV cache of an engine holds at once."""
        return max(0.0, self.tokens) / (self.shape.cached_tokens(length) + self.state_tokens)


def add_parts(*parts: Mapping[str, float]) -> Parts:
    """Return part -> sum of its bytes in all mappings, in the order of PARTS, without parts that are 0."""
    sums = {name: sum(part.get(name, 0.0) for part in parts) for name in PARTS}
    if unknown := {name for part in parts for name in part} - sums.keys():
        raise AssertionError(f"not parts of memory: {unknown}")
    return {name: size for name, size in sums.items() if size}


# ---- what train ranks hold, and work on ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankBatches:
    """The largest microbatches of a data-parallel rank, before context parallelism divides them."""

    train_tokens: int  # tokens of a microbatch with gradients
    forward_tokens: int  # tokens of a microbatch without gradients
    microbatches: int  # number in an optimizer step
    batch_bytes: float  # bytes on the device of a step's packed batches


@dataclass(frozen=True, slots=True)
class TrainModel:
    """A model of the train ranks, and the purposes that it serves (`pipeline.train.train_backend.Use`)."""

    policy: PolicyConfig
    shape: ModelShape
    values: bool = False  # one value per token instead of log-probs
    trained: bool = True
    reference: bool = False
    entropy: bool = False
    offload: bool = False
    top_k: int = 0
    merged: bool = True  # with adapters: something reads merged weights, which the backend then keeps
    state_bytes: tuple[float, float] = ADAM_BYTES  # of the optimizer per element of (matrices, other parameters)

    @property
    def size(self) -> int:
        """Return the bytes of an element in the compute precision."""
        return PRECISIONS[self.policy.precision]


def models(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> list[TrainModel]:
    """Return the models of the train ranks, the policy first. shapes: section -> shape, for the sections of `config.models`."""
    train_models, needs = [], build(recipe).needs
    exports = recipe.checkpointing.enabled and recipe.checkpointing.save_consolidated
    merged = exports or (config.generates(recipe) and not refits_adapters(recipe))
    states = {name: optimizer_state(recipe, optimizer)[0] for name, optimizer in optimizers(recipe).items()}
    offloads = {config.teacher_section(name): teacher.cpu_offload for name, teacher in config.teachers(recipe).items()}
    for name, policy in config.models(recipe).items():
        shape = shapes[name]
        if name == "policy":
            values = needs.head == "values"
            use = {"values": values, "reference": needs.reference, "entropy": needs.entropy, "merged": merged}
            train_models.append(TrainModel(policy, shape, **use, state_bytes=states.get(name, ADAM_BYTES)))
        elif name == "value":
            train_models.append(TrainModel(policy, shape, values=True, state_bytes=states.get(name, ADAM_BYTES)))
        elif name in offloads:
            train_models.append(TrainModel(policy, shape, trained=False, offload=offloads[name], top_k=needs.teacher_top_k))
        elif (environment := config.reward_model(recipe)) is not None and environment.served_by == "train":
            train_models.append(TrainModel(policy, shape, values=True, trained=False, offload=environment.cpu_offload))
    return train_models


def optimizer_state(recipe: Recipe, optimizer: OptimizerConfig) -> tuple[tuple[float, float], str]:
    """Return (bytes of its state per element of matrices and of other parameters, what is assumed; "" if measured)."""
    if optimizer.name in ("torch.optim.AdamW", "torch.optim.Adam") and not optimizer.kwargs.get("amsgrad"):
        return ADAM_BYTES, ""
    trial = try_on_this_machine(recipe, optimizer)
    return trial.state_bytes or ADAM_BYTES, "" if trial.state_bytes else f"state of {optimizer.name} as large as Adam's"


def longest_sequence(recipe: Recipe) -> int:
    """Return the greatest number of tokens that a sequence can have.

    For an offline algorithm, data.max_input_seq_length also limits it, since longer records are dropped or refused, and so does
    plan.longest_tokens.
    """
    longest = recipe.policy.max_total_sequence_length
    if config.generates(recipe):
        return longest
    return min(longest, recipe.data.max_input_seq_length, recipe.plan.longest_tokens or longest)


def rank_batches(recipe: Recipe, data_ranks: int) -> RankBatches:
    """Return the microbatches of a data-parallel rank. data_ranks: the number of data-parallel train ranks.

    With packing, every microbatch is assumed to be full. Without packing, all its sequences are assumed to have the greatest
    length.
    """
    algorithm, policy = build(recipe), recipe.policy
    together, needs = algorithm.sequences_per_item, algorithm.needs
    longest, packing = longest_sequence(recipe), policy.sequence_packing
    update = -(-policy.train_global_batch_size // data_ranks) * together * longest
    train, forward = (size * together * longest for size in (policy.train_micro_batch_size, policy.logprob_batch_size))
    if packing.enabled:
        train, forward = packing.train_tokens, packing.logprob_mb_tokens
    train, forward = min(train, update), min(forward, update)
    fields = (3 if needs.critic else 2) + needs.teacher_logprobs
    columns = needs.teacher_top_k * (2 if needs.own_top_k else 1)
    token = TOKEN_BYTES + fields * FIELD_BYTES + TEACHER_BYTES * columns
    step = -(-algorithm.samples_per_step // data_ranks) * longest
    return RankBatches(train, forward, -(-update // train), step * token)
