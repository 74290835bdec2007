"""Choose what the backward pass recomputes, and the tokens of its microbatches: keys that a recipe leaves null.

Every setting of these keys is tried: nothing recomputed, whole layers, with FSDP2 selective recomputation where layers run
eagerly, and with Megatron-Core whole layers of a part of each stage; each with microbatches from the longest sequence upwards.
The fastest one that leaves `spare` of a GPU's memory is chosen. Among settings within NEAR of it, less recomputation wins, then
larger microbatches, which need fewer gathers of weights and fewer kernels. If none leaves so much, the setting with the least
memory is chosen. If memory is unknown (no GPUs, no model yet, or a family without a plan), whole layers are recomputed, in the
smallest microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.plan import gpu_check, memory, memory_generate, shared_gpus, train_time
from launch.plan.advice import set_key
from launch.plan.lengths import Lengths, assume
from launch.plan.memory_megatron import stages
from launch.plan.memory_parts import GenerateMemory, TrainModel
from launch.plan.rank_division import train_parallelism
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Recipe, compiles, hardware, uses_megatron
from pipeline.models import flops
from pipeline.models.shape import ModelShape

SPARE, SPARE_OF_MIXTURES = 0.08, 0.2
"""Assumed: share of a GPU's memory for the estimate's error and for what `launch/plan/memory.py` does not count, fragmentation
and, in mixtures of experts, the ranks whose experts receive more tokens than the even share."""
NEAR = 0.01  # assumed: relative difference of times below which the estimate prefers none
SMALLEST, LARGEST = 4096, 16384
"""Assumed: a context-parallel rank's tokens of microbatches that are tried, where sequences are no longer. At 4,096 tokens a
product of bfloat16 matrices takes thousands of operations for each byte that it reads, so larger ones make it no faster."""
TOKENS = "policy.sequence_packing.train_mb_tokens"
NAMES = ("activation_checkpointing", "recompute_granularity", "recompute_method", "recompute_num_layers")
"""Keys of a backend's section. The last two are Megatron-Core's, and null has a meaning of its own there."""

Setting = Mapping[str, Any]
"""Key -> value of each open key."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A recipe with a setting, and its estimates."""

    recipe: Recipe
    setting: Setting
    seconds: float  # of a step on the train ranks
    nbytes: float  # as `_bytes` returns them
    recomputed: float  # share of a forward pass's matrix products

    @property
    def preference(self) -> tuple[float, bool, int]:
        """Return the sort key among settings that take the same time."""
        _, settings = _section(self.recipe)
        return self.recomputed, settings.activation_checkpointing, -self.recipe.policy.sequence_packing.train_tokens


def open_keys(recipe: Recipe) -> tuple[str, ...]:
    """Return the keys that the plan has to choose. The train backend must be chosen."""
    section, settings = _section(recipe)
    null = [name for name in NAMES if getattr(settings, name, "") is None]
    keys = [f"{section}.{name}" for name in null] if set(null) & set(NAMES[:2]) else []
    return (*keys, *((TOKENS,) if recipe.policy.sequence_packing.train_mb_tokens is None else ()))


def choose(
    recipe: Recipe, shapes: Mapping[str, ModelShape] | None, before: Recipe | None = None, lengths: Lengths | None = None
) -> tuple[Recipe, str]:
    """Return the recipe without open keys, and the choice with its reason: one line, empty if no key is open.

    shapes: of all models; None if they are not known. before: the recipe with which the run began, whose values stay.
    But if these do not fit other GPUs, another recomputation is chosen, which computes the same bits. lengths: of the data;
    None: those that the recipe assumes.
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
        reason = "cluster.train has no GPUs" if shapes else "the plan does not know the model"
        return _with(recipe, settings[-1]), _line(settings[-1], f"which needs the least memory, because {reason}")
    tried = try_all(recipe, settings, shapes, lengths or assume(recipe))
    memory_gb = _memory_gb(recipe)
    best, fitting = fastest(tried, (1 - spare(shapes)) * memory_gb * 1e9)
    used = f"{best.nbytes / 1e9:.1f} of {memory_gb:g} GB"
    if not fitting:
        return best.recipe, _line(best.setting, f"which needs the least memory: {used}. None leaves {spare(shapes):.0%}")
    of = f"the fastest of the {len(fitting)} settings of {len(tried)} that leave"
    of = of if len(fitting) > 1 else f"the only setting of {len(tried)} that leaves"
    return best.recipe, _line(best.setting, f"{of} {spare(shapes):.0%} of a GPU's memory: {used}")


def again(recipe: Recipe, keys: Sequence[str], shapes: Mapping[str, ModelShape], lengths: Lengths) -> Recipe:
    """Return the recipe with these keys chosen anew, for other GPUs or another placement."""
    if not keys:
        return recipe
    return choose(_with(recipe, dict.fromkeys(keys)), shapes, lengths=lengths)[0]


def faster(recipe: Recipe, shapes: Mapping[str, ModelShape], lengths: Lengths) -> tuple[Recipe, str]:
    """Return the recipe with the recomputation that would be chosen for its microbatches, and the keys that select it."""
    section, settings = _section(recipe)
    keys = [f"{section}.{name}" for name in NAMES if hasattr(settings, name)]
    variant = again(recipe, keys, shapes, lengths)
    changed_keys = [key for key in keys if _value(variant, key) != _value(recipe, key)]
    return variant, " ".join(config.format_override(key, _value(variant, key)) for key in changed_keys)


def spare(shapes: Mapping[str, ModelShape]) -> float:
    """Return the share of a GPU's memory that a chosen setting leaves."""
    return SPARE_OF_MIXTURES if any(shape.experts for shape in shapes.values()) else SPARE


def fastest(tried: Sequence[Tried], room: float) -> tuple[Tried, list[Tried]]:
    """Return the setting to choose, and all that fit into `room` bytes of a GPU."""
    fitting = [setting for setting in tried if setting.nbytes <= room]
    if not fitting:
        return min(tried, key=lambda setting: (setting.nbytes, setting.seconds)), fitting
    least = min(setting.seconds for setting in fitting)
    return min(
        (setting for setting in fitting if setting.seconds <= (1 + NEAR) * least), key=lambda setting: setting.preference
    ), fitting


def try_all(recipe: Recipe, settings: Sequence[Setting], shapes: Mapping[str, ModelShape], lengths: Lengths) -> list[Tried]:
    """Return the estimates of a recipe with each setting."""
    engine = _engine(recipe, shapes)
    return [_try_settings(_with(recipe, setting), setting, shapes, lengths, engine) for setting in settings]


def _engine(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> GenerateMemory | None:
    """Return the memory of the generate rank that shares a train rank's GPU; None without one."""
    return (
        memory_generate.generate(gpu_check.with_measured_memory(recipe), shapes["policy"]) if config.colocated(recipe) else None
    )


def _bytes(recipe: Recipe, shapes: Mapping[str, ModelShape], engine: GenerateMemory | None) -> float:
    """Return the bytes of the fullest GPU while the train rank trains. Settings change no other turn of a shared GPU."""
    train = memory.train(recipe, shapes)
    turns = {turn.name: turn.total for turn in shared_gpus.turns(recipe, train, engine)} if engine else {}
    return turns.get("training", train.total)


def _try_settings(
    recipe: Recipe, setting: Setting, shapes: Mapping[str, ModelShape], lengths: Lengths, engine: GenerateMemory | None
) -> Tried:
    phases = train_time.phases(recipe, shapes, lengths, gpu_check.gpu(recipe, recipe.cluster.train))
    size = recipe.policy.megatron_cfg.pipeline_model_parallel_size
    recomputed = flops.recomputed_share(recipe.policy, shapes["policy"], size, 0.0)
    return Tried(recipe, setting, sum(phase.seconds for phase in phases), _bytes(recipe, shapes, engine), recomputed)


# ---- settings -----------------------------------------------------------------------------------------------------------


def _settings(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[Setting]:
    """Yield every setting of the open keys that agrees with the other keys, last the setting that needs the least memory."""
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
    """Yield tokens of a microbatch, the most first. The longest sequence, or pair of sequences, fits."""
    context = train_parallelism(recipe.policy, recipe.cluster.train).context
    least = max(context * SMALLEST, recipe.policy.max_total_sequence_length * build(recipe).sequences_per_item)
    doublings = max(1, context * LARGEST // least).bit_length() - 1
    yield from (least << power for power in range(doublings, -1, -1))


def _fsdp(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[tuple[Any, ...]]:
    """Yield values of NAMES. Selective recomputation would make layers eager that otherwise compile, and so run faster."""
    yield False, "full"
    if not compiles(recipe.policy, shapes is not None and shapes["policy"].mixture):
        yield True, "selective"
    yield True, "full"


def _megatron(recipe: Recipe, shapes: Mapping[str, ModelShape] | None) -> Iterator[tuple[Any, ...]]:
    """Yield values of NAMES. Selective recomputation saves no memory, as flash attention has nothing to recompute.

    It is only for a recipe that asks for it.
    """
    configured = recipe.policy.megatron_cfg
    if configured.recompute_granularity == "selective" or configured.recompute_modules is not None:
        yield True, "selective", None, None
        return
    yield False, "full", None, None
    if shapes:
        layers = max(stage.layers for stage in stages(TrainModel(recipe.policy, shapes["policy"])))
        yield from ((True, "full", "block", count) for count in range(1, layers))
    yield True, "full", configured.recompute_method, configured.recompute_num_layers


def _kept_setting(recipe: Recipe, before: Recipe) -> Setting:
    """Return the earlier values of the open keys, without keys of recomputation if other keys of recomputation changed."""
    section, configured = _section(recipe)
    values = {f"{section}.{name}": _value(before, f"{section}.{name}") for name in NAMES if hasattr(configured, name)}
    agree = all(_value(recipe, key) in (None, value) for key, value in values.items())
    keys = [key for key in open_keys(recipe) if key == TOKENS or agree]
    return {key: _value(before, key) for key in keys}


def _fits(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> bool:
    if not recipe.cluster.train.gpus_per_node:
        return True
    return _bytes(recipe, shapes, _engine(recipe, shapes)) <= _memory_gb(recipe) * 1e9


def _memory_gb(recipe: Recipe) -> float:
    """Return the memory of a train rank's GPU: measured, if plan.hardware is set."""
    return hardware.memory_gb(gpu_check.with_measured_memory(recipe).cluster.train)


def _compile_alike(recipe: Recipe, other_recipe: Recipe, shapes: Mapping[str, ModelShape]) -> bool:
    """Return whether both recipes compile layers or neither does, since compiled layers round differently."""
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
        recipe = set_key(recipe, key, value)
    return recipe


def _line(setting: Setting, reason: str) -> str:
    """Return the choice with its reason, without keys that keep their default, null or whole layers; empty if all do."""
    values = {key: value for key, value in setting.items() if value not in (None, "full")}
    settings_text = " ".join(config.format_override(key, value) for key, value in values.items())
    return f"{settings_text}, {reason}" if settings_text else ""
