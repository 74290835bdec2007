"""Choose values for keys that a recipe leaves null: what the backward pass recomputes, and the tokens of its microbatches.

The plan estimates every setting of these keys. A setting recomputes nothing or whole layers; with FSDP2, if layers run eagerly,
also selected operations; with Megatron-Core also whole layers in only a part of each stage. Each of these is combined with
several sizes of microbatches, from the longest sequence upwards.

The fastest setting that leaves the share `spare` of a GPU's memory free is chosen. If other such settings are at most the share
NEAR slower, the one with the least recomputation is chosen, then the one with the largest microbatches, which need fewer
gathers of weights and fewer kernels. If no setting leaves that share, the setting with the least memory is chosen. If memory is
unknown (no GPUs, no model yet, or a family that cannot be planned), whole layers are recomputed, in the smallest microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.plan import gpu_check, memory, memory_generate, shared_gpus, train_time
from launch.plan.lengths import Lengths, assume
from launch.plan.memory_parts import TrainModel
from launch.plan.rank_division import train_parallelism
from launch.plan.rank_memory import stages
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Recipe, compiles, hardware, uses_megatron
from pipeline.models import flops
from pipeline.models.shape import ModelShape
from pipeline.models.tensors import can_describe

SPARE, SPARE_OF_MIXTURES = 0.08, 0.2
"""Assumed shares of a GPU's memory that stay free for errors of the estimate and for memory that `launch/plan/memory.py` does
not count: fragmentation and, in mixtures of experts, ranks whose experts receive more tokens than an even share."""
NEAR = 0.01  # assumed: relative difference of times below which the estimate prefers none
SMALLEST, LARGEST = 4096, 16384
"""Assumed bounds of a microbatch's tokens on a context-parallel rank, if no sequence is longer. With 4,096 tokens a product of
bfloat16 matrices already takes thousands of operations for each byte that it reads, so that more tokens make it no faster."""
TOKENS = "policy.sequence_packing.train_mb_tokens"
NAMES = ("activation_checkpointing", "recompute_granularity", "recompute_method", "recompute_num_layers")
"""Keys of recomputation in a backend's section. The last two exist only for Megatron-Core. If they are null, they are open only
if one of the first two is open; otherwise their null has a meaning."""

Setting = Mapping[str, Any]
"""Open key -> its value."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A recipe with one setting of its open keys, and the estimates for it."""

    recipe: Recipe
    setting: Setting
    seconds: float  # of a step on the train ranks
    nbytes: float  # as `_bytes` returns them
    recomputed: float  # share of a forward pass's matrix products

    @property
    def preference(self) -> tuple[float, bool, int]:
        """Return the sort key among settings that take about the same time: less recomputation, then larger microbatches."""
        _, settings = _section(self.recipe)
        return self.recomputed, settings.activation_checkpointing, -self.recipe.policy.sequence_packing.train_tokens


def open_keys(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys for which the plan has to choose values. The recipe's train backend must already be chosen."""
    section, settings = _section(recipe)
    null = [name for name in NAMES if getattr(settings, name, "") is None]
    keys = [f"{section}.{name}" for name in null] if set(null) & set(NAMES[:2]) else []
    return (*keys, *((TOKENS,) if recipe.policy.sequence_packing.train_mb_tokens is None else ()))


def choose(
    recipe: Recipe, shapes: Mapping[str, ModelShape] | None, before: Recipe | None = None, lengths: Lengths | None = None
) -> tuple[Recipe, str]:
    """Return (the recipe with values for all open keys, one line with the choice and its reason; "" if no key was open).

    shapes: section -> shape of its model; None if they are not known. before: the recipe with which the run began; its values
    are kept, except that another recomputation with the same bits is chosen if they do not fit the present GPUs. lengths: the
    lengths of sequences; None: those of `lengths.assume`.
    """
    if not open_keys(recipe):
        return recipe, ""
    if before is not None and (earlier := _kept_setting(recipe, before)):
        kept = _with(recipe, earlier)
        anew = shapes is not None and not open_keys(kept) and not _fits(kept, shapes) and _compile_alike(recipe, kept, shapes)
        recipe = _with(recipe, {TOKENS: earlier[TOKENS]} if TOKENS in earlier else {}) if anew else kept
        if not open_keys(recipe):
            return recipe, _line(earlier, "as the run began")
    settings, train = list(_settings(recipe, shapes)), recipe.cluster.train
    if shapes is None or not train.gpus_per_node:
        why = "the plan does not know the model" if can_describe() else "torch or transformers is not installed here"
        reason = why if train.gpus_per_node else "cluster.train has no GPUs"
        return _with(recipe, settings[-1]), _line(settings[-1], f"which needs the least memory, because {reason}")
    tried = try_all(recipe, settings, shapes, lengths or assume(recipe))
    memory_gb = _memory_gb(recipe)
    best, fitting = fastest(tried, (1 - spare(shapes)) * memory_gb * 1e9)
    used = f"{best.nbytes / 1e9:.1f} of {memory_gb:g} GB"
    if not fitting:
        return best.recipe, _line(best.setting, f"which needs the least memory: {used}. None leaves {spare(shapes):.0%} free")
    of = f"the fastest of {len(fitting)} settings ({len(tried)} tried) that leave"
    of = of if len(fitting) > 1 else f"the only setting ({len(tried)} tried) that leaves"
    return best.recipe, _line(best.setting, f"{of} {spare(shapes):.0%} of a GPU's memory free: {used}")


def again(recipe: Recipe, keys: Sequence[str], shapes: Mapping[str, ModelShape], lengths: Lengths) -> Recipe:
    """Return the recipe with new choices for the open keys `keys`, as other GPUs or another placement need them."""
    if not keys:
        return recipe
    return choose(_with(recipe, dict.fromkeys(keys)), shapes, lengths=lengths)[0]


def spare(shapes: Mapping[str, ModelShape]) -> float:
    """Return the share of a GPU's memory that a chosen setting must leave free."""
    return SPARE_OF_MIXTURES if any(shape.experts for shape in shapes.values()) else SPARE


def fastest(tried: Sequence[Tried], room: float) -> tuple[Tried, list[Tried]]:
    """Return (the setting to choose, all settings that fit into `room` bytes of a GPU's memory)."""
    fitting = [setting for setting in tried if setting.nbytes <= room]
    if not fitting:
        return min(tried, key=lambda setting: (setting.nbytes, setting.seconds)), fitting
    least = min(setting.seconds for setting in fitting)
    return min(
        (setting for setting in fitting if setting.seconds <= (1 + NEAR) * least), key=lambda setting: setting.preference
    ), fitting


def try_all(recipe: Recipe, settings: Sequence[Setting], shapes: Mapping[str, ModelShape], lengths: Lengths) -> list[Tried]:
    """Return, for each setting, the recipe with this setting and its estimates."""
    tried = []
    stages = recipe.policy.megatron_cfg.pipeline_model_parallel_size
    for setting in settings:
        variant = _with(recipe, setting)
        gpu = gpu_check.gpu(variant, variant.cluster.train)
        seconds = sum(phase.seconds for phase in train_time.phases(variant, shapes, lengths, gpu))
        recomputed = flops.recomputed_share(variant.policy, shapes["policy"], stages, 0.0)
        tried.append(Tried(variant, setting, seconds, _bytes(variant, shapes), recomputed))
    return tried


def _bytes(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> float:
    """Return the bytes on the fullest GPU while its train rank trains, with an inactive generate rank that shares it."""
    train = memory.train(recipe, shapes).total
    if not config.colocated(recipe):
        return train
    return train + shared_gpus.asleep(memory_generate.generate(gpu_check.with_measured_memory(recipe), shapes["policy"]))


# ---- settings -----------------------------------------------------------------------------------------------------------


def _settings(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[Setting]:
    """Yield every setting of the open keys that agrees with the other keys. The last one needs the least memory."""
    section, configured = _section(recipe)
    keys = open_keys(recipe)
    ways = _megatron(recipe, shapes) if uses_megatron(recipe.policy) else _fsdp(recipe, shapes)
    for values in ways:
        way = dict(zip(NAMES, values, strict=False))
        if any(getattr(configured, name) not in (None, value) for name, value in way.items()):
            continue
        for tokens in _tokens(recipe) if TOKENS in keys else (None,):
            setting = {f"{section}.{name}": value for name, value in way.items()} | {TOKENS: tokens}
            yield {key: value for key, value in setting.items() if key in keys}


def _tokens(recipe: Recipe) -> Iterator[int]:
    """Yield numbers of tokens of a microbatch, the largest first. All have room for the longest sequence or pair."""
    context = train_parallelism(recipe.policy, recipe.cluster.train).context
    least = max(context * SMALLEST, recipe.policy.max_total_sequence_length * build(recipe).sequences_per_item)
    doublings = max(1, context * LARGEST // least).bit_length() - 1
    yield from (least << power for power in range(doublings, -1, -1))


def _fsdp(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[tuple[Any, ...]]:
    """Yield values of the first two NAMES for FSDP2.

    Selective recomputation is left out if layers compile: it would make them eager, and compiled layers are faster.
    """
    yield False, "full"
    if not compiles(recipe.policy, shapes is not None and shapes["policy"].mixture):
        yield True, "selective"
    yield True, "full"


def _megatron(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[tuple[Any, ...]]:
    """Yield values of NAMES for Megatron-Core.

    Selective recomputation is yielded only if the recipe's keys ask for it. It saves no memory here, because flash attention
    keeps nothing that could be recomputed.
    """
    configured = recipe.policy.megatron_cfg
    if configured.recompute_granularity == "selective" or configured.recompute_modules is not None:
        yield True, "selective", None, None
        return
    yield False, "full", None, None
    if shapes:
        layers = max(stage.layers for stage in stages(TrainModel(recipe.policy, shapes["policy"]), True))
        yield from ((True, "full", "block", count) for count in range(1, layers))
    yield True, "full", configured.recompute_method, configured.recompute_num_layers


def _kept_setting(recipe: Recipe, before: Recipe) -> Setting:
    """Return open key -> its value in `before`, without keys of recomputation if the recipe sets one of them differently."""
    section, configured = _section(recipe)
    values = {f"{section}.{name}": _value(before, f"{section}.{name}") for name in NAMES if hasattr(configured, name)}
    agree = all(_value(recipe, key) in (None, value) for key, value in values.items())
    keys = [key for key in open_keys(recipe) if key == TOKENS or agree]
    return {key: _value(before, key) for key in keys}


def _fits(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> bool:
    if not recipe.cluster.train.gpus_per_node:
        return True
    return _bytes(recipe, shapes) <= _memory_gb(recipe) * 1e9


def _memory_gb(recipe: Recipe) -> float:
    """Return the GB of memory of a train rank's GPU, as measured if plan.hardware is set."""
    return hardware.memory_gb(gpu_check.with_measured_memory(recipe).cluster.train)


def _compile_alike(recipe: Recipe, other_recipe: Recipe, shapes: Mapping[str, ModelShape]) -> bool:
    """Return whether both recipes compile layers, or neither does. Compiled layers round differently from eager ones."""
    mixture = shapes["policy"].mixture
    return compiles(recipe.policy, mixture) == compiles(other_recipe.policy, mixture)


def _section(recipe: Recipe) -> tuple[str, Any]:
    policy = recipe.policy
    if uses_megatron(policy):
        return "policy.megatron_cfg", policy.megatron_cfg
    return "policy.dtensor_cfg", policy.dtensor_cfg


def _value(recipe: Recipe, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), recipe)


def _with(recipe: Recipe, setting: Setting) -> Recipe:
    for key, value in setting.items():
        recipe = _set_key(recipe, key, value)
    return recipe


def _set_key(section: Any, key: str, value: Any) -> Any:
    name, _, subkey = key.partition(".")
    return replace(section, **{name: _set_key(getattr(section, name), subkey, value) if subkey else value})


def _line(setting: Setting, reason: str) -> str:
    """Return a text with the chosen keys and the reason, without keys that are null or "full"; "" if no key remains."""
    values = {key: value for key, value in setting.items() if value not in (None, "full")}
    settings_text = " ".join(config.format_override(key, value) for key, value in values.items())
    return f"{settings_text}, {reason}" if settings_text else ""
