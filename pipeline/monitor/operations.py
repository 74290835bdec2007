"""Count the operations (FLOPs) of a step, and compute their rate as a share of the GPUs' peak rate.

    MFU = model FLOPs / (seconds of the phase x ranks x peak FLOP/s)      without recomputation
    HFU = (model + recomputed FLOPs) / (the same divisor)                 arXiv 2205.05198, section 6.3

`pipeline.models.flops` counts the operations for the tokens that the step read and drew; the plan uses the same counts. The
peak is the GPU's peak in recipes/hardware for the precision of its matrix products.

    train       in time/train: forward passes of each model; an update counts as three passes (two with adapters)
    generate    in time/rollout, or time/step if engines run ahead: each drawn token, and each prompt once (once for each answer
                without a prefix cache)

`tflops_per_rank` is the rate itself, in TFLOP/s per rank. MFU and HFU are known only on GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline import config
from pipeline.algorithms import build
from pipeline.algorithms.algorithm import Needs
from pipeline.config import ComponentConfig, PolicyConfig, Recipe, hardware
from pipeline.models import flops
from pipeline.models.hugging_face import model_config
from pipeline.models.shape import ModelShape
from pipeline.types import RolloutGroup, Sample

logger = logging.getLogger(__name__)

TERA = 1e12


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The operations of a phase: `model` without recomputation, `hardware` with it."""

    model: float = 0.0
    hardware: float = 0.0

    def __add__(self, other: ModelWork) -> ModelWork:
        return ModelWork(self.model + other.model, self.hardware + other.hardware)

    def __mul__(self, factor: float) -> ModelWork:
        return ModelWork(self.model * factor, self.hardware * factor)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model on the train ranks."""

    shape: ModelShape
    policy: PolicyConfig

    def forward(self, lengths: Sequence[int]) -> ModelWork:
        """Return the operations of a forward pass over sequences of these lengths."""
        work = flops.forward(self.shape, sum(lengths), sum(length**2 for length in lengths) / 2)
        return ModelWork(work, work)

    def update(self, lengths: Sequence[int]) -> ModelWork:
        """Return the operations of a forward and a backward pass."""
        forward = self.forward(lengths).model
        attention = flops.attention(self.shape, sum(length**2 for length in lengths) / 2)
        again = flops.recomputed_share(self.policy, self.shape, self._stages, attention / forward)
        backward = 1 if config.adapters(self.policy) else 2  # with adapters, frozen weights need no gradient
        return ModelWork((1 + backward) * forward, (1 + backward + again) * forward)

    @property
    def _stages(self) -> int:
        return self.policy.megatron_cfg.pipeline_model_parallel_size if config.uses_megatron(self.policy) else 1


class StepOperations:
    """Counts the operations of a recipe's steps."""

    def __init__(self, recipe: Recipe, shapes: Mapping[str, ModelShape]):
        """Prepare to count. shapes: section -> shape, for the models in `config.models`."""
        models = config.models(recipe)
        self._models = {name: TrainedModel(shape, models[name]) for name, shape in shapes.items()}
        algorithm = build(recipe)
        self._needs: Needs = algorithm.needs
        self._old_share = algorithm.old_share
        generation = recipe.policy.generation
        self._cached = generation.backend == "vllm" and generation.vllm_cfg.enable_prefix_caching
        self._peaks = {name: _peak(recipe, name, of) for name, of in config.model_components(recipe).items()}

    @classmethod
    def of(cls, recipe: Recipe) -> StepOperations | None:
        """Return the counter of a recipe; None, and a line in the log, if a model's shape is not known."""
        try:
            shapes = {
                name: ModelShape.of(model_config(policy).get_text_config().to_dict())
                for name, policy in config.models(recipe).items()
            }
            return cls(recipe, shapes)
        except Exception as error:  # the run is worth more than its MFU
            logger.warning("resources/*_mfu and *_tflops are left out: %s", error)
            return None

    def train(self, samples: Sequence[Sample], models: Sequence[str]) -> ModelWork:
        """Return the operations of the train ranks in a step on these samples. models: the models that are updated."""
        samples = [each for sample in samples for each in (sample, *sample.branches)]
        lengths, needs, policy = [len(sample.tokens) for sample in samples], self._needs, self._models["policy"]
        total = policy.forward(lengths) * (self._old_share + needs.reference + 2 * needs.mismatched + needs.own_top_k)
        critic = self._models.get("value")
        if needs.critic and critic:
            total += critic.forward(lengths)
        for name in sorted({sample.teacher for sample in samples} if needs.has_teachers else ()):
            taught = [len(sample.tokens_of_teacher) for sample in samples if sample.teacher == name]
            total += self._models[config.teacher_section(name)].forward(taught)
        for name in models:
            trained = critic if name == "critic" else policy
            if trained:
                total += trained.update(lengths) * needs.epochs
        return total

    def generate(self, groups: Sequence[RolloutGroup]) -> float:
        """Return the operations of the engines that drew these rollouts: prompts once with a prefix cache, then each token.

        Of the context of an episode's other conversation, a prefix cache holds what begins as the first conversation does.
        """
        total = 0.0
        for group in groups:
            cached = group.prompt.tokens[:0]
            for rollout in group.rollouts:
                for conversation in rollout.conversations(group.prompt):
                    context, turns = conversation.context, conversation.turns
                    drawn = sum(len(turn.completion.tokens) + len(turn.observation) for turn in turns)
                    total += self._read(len(context), _equal_tokens(context, cached)) + self._draw(len(context), drawn)
                    if self._cached and conversation.turns is rollout.turns:
                        cached = np.concatenate([context, rollout.tokens])
        return total

    def _read(self, tokens: int, cached: int) -> float:
        return flops.forward(self._models["policy"].shape, tokens - cached, (tokens**2 - cached**2) / 2)

    def _draw(self, context: int, drawn: int) -> float:
        shape, pairs = self._models["policy"].shape, ((context + drawn) ** 2 - context**2) / 2
        return flops.forward(shape, drawn, 0) + flops.decode_attention(shape, pairs)

    def metrics(self, component: str, work: ModelWork, seconds: float, ranks: int) -> dict[str, float]:
        """Return `resources/COMPONENT_...`: TFLOP/s of a rank and, on GPUs, MFU and, for training, HFU."""
        if not work.model or seconds <= 0:
            return {}
        prefix, peak = f"resources/{component}", self._peaks[component]
        rates = {f"{prefix}_tflops_per_rank": work.model / seconds / ranks / TERA}
        if peak:
            rates[f"{prefix}_mfu"] = work.model / (seconds * ranks * peak)
            if component == "train":
                rates[f"{prefix}_hfu"] = work.hardware / (seconds * ranks * peak)
        return rates


def _equal_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal tokens at the beginning of two sequences."""
    length = min(len(first), len(second))
    return int(np.argmin(np.append(first[:length] == second[:length], False)))


def _peak(recipe: Recipe, name: str, component: ComponentConfig) -> float | None:
    """Return the peak FLOP/s of a component's GPU in the precision of its matrix products; None without GPUs."""
    if not component.gpus_per_node:
        return None
    gpu = hardware.gpu(component.gpu)
    if name == "generate" and recipe.policy.generation.vllm_cfg.precision == "fp8":
        return gpu.fp8_tflops * TERA
    return (gpu.fp32_tflops if recipe.policy.precision == "float32" else gpu.bf16_tflops) * TERA
