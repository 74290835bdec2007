"""What the train ranks hold and are given: models with their uses, and the largest microbatches.

Lengths are not known before a run, so microbatches are taken to be as full as the recipe allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.model_shape import ModelShape
from launch.plan.lengths import sequences
from pipeline import config
from pipeline.config import PAIRED, PRECISIONS, PolicyConfig, Recipe

TOKEN_BYTES = 8 + 8 + 1 + 4 + 4  # of a packed batch: token, position, mask, log-prob, advantage (pipeline.types.PackedBatch)
FIELD_BYTES = 4  # what a forward pass adds for each token: old or reference log-prob, value
TEACHER_BYTES = 8 + 4  # for each token and each of its teacher's K: token, log-prob


@dataclass(frozen=True, slots=True)
class Load:
    """Of one rank, at most, before context parallelism cuts it."""

    train_tokens: int  # of a microbatch with a graph
    forward_tokens: int  # of one without
    microbatches: int  # of an optimizer step
    batch_bytes: float  # of a step's packed batches, which lie on the device


@dataclass(frozen=True, slots=True)
class Model:
    """One of the train realm, and what it is for (`pipeline.train.base.Use`)."""

    policy: PolicyConfig
    shape: ModelShape
    values: bool = False  # one number per token in place of log-probs
    trained: bool = True
    reference: bool = False
    entropy: bool = False
    offload: bool = False
    top_k: int = 0

    @property
    def size(self) -> int:
        """Bytes of a number in the precision it computes in."""
        return PRECISIONS[self.policy.precision]

    @property
    def output(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return self.shape.hidden if self.values else self.shape.output

    @property
    def table(self) -> int:
        """Parameters of the embedding."""
        return self.shape.embedding - self.shape.output


def models(recipe: Recipe, shapes: dict[str, ModelShape]) -> list[Model]:
    """Of the train ranks, the policy first. shapes: by the sections of `config.models`."""
    loss, found = recipe.loss_fn, []
    for name, policy in config.models(recipe).items():
        shape = shapes[name]
        if name == "policy":
            entropy = loss.log_entropy or loss.entropy_coeff != 0
            reference = recipe.algorithm in ("grpo", "ppo") and loss.reference_policy_kl_penalty != 0
            if recipe.algorithm == "distillation":
                entropy = loss.zero_outside_topk and loss.kl_type != "forward"
            elif recipe.algorithm == "dpo":
                entropy, reference = False, not recipe.dpo.reference_free
            elif recipe.algorithm in ("sft", "rm"):
                entropy = False
            found.append(Model(policy, shape, values=recipe.algorithm == "rm", reference=reference, entropy=entropy))
        elif name == "value":
            found.append(Model(policy, shape, values=True))
        elif name == "teacher":
            top_k = recipe.distillation.topk_logits_k
            found.append(Model(policy, shape, trained=False, offload=recipe.teacher.cpu_offload, top_k=top_k))
        elif (environment := config.reward_model(recipe)).served_by == "train":
            found.append(Model(policy, shape, values=True, trained=False, offload=environment.cpu_offload))
    return found


def load(recipe: Recipe, data_ranks: int) -> Load:
    """data_ranks: how many train ranks have samples of their own."""
    policy, together = recipe.policy, 2 if recipe.algorithm in PAIRED else 1
    longest, packing = policy.max_total_sequence_length, policy.sequence_packing
    update = -(-policy.train_global_batch_size // data_ranks) * together * longest
    train, forward = (size * together * longest for size in (policy.train_micro_batch_size, policy.logprob_batch_size))
    if packing.enabled:
        train, forward = packing.train_mb_tokens, packing.logprob_mb_tokens
    train, forward = min(train, update), min(forward, update)
    fields = 3 * FIELD_BYTES if recipe.algorithm == "ppo" else 2 * FIELD_BYTES
    teacher = TEACHER_BYTES * recipe.distillation.topk_logits_k if recipe.algorithm == "distillation" else 0
    step = -(-sequences(recipe) // data_ranks) * longest
    return Load(train, forward, -(-update // train), step * (TOKEN_BYTES + fields + teacher))
