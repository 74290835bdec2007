"""Translate optimizers and learning-rate schedules of transformers."""

from __future__ import annotations

import math
from typing import Any

from launch.recipes.translation.rules import Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.trl.trl_lengths import RunLength

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
IN_32_BITS = {  # optimizers whose state has fewer bits -> our optimizer
    **{f"{paged}adamw_{bits}": "AdamW" for paged in ("", "paged_") for bits in ("8bit", "32bit", "bnb_8bit")},
    "adamw_torch_8bit": "AdamW",
    "adamw_torch_4bit": "AdamW",
}
SCHEDULES = "linear, cosine, constant, constant_with_warmup, cosine_with_min_lr, polynomial, warmup_stable_decay"
NEEDS_LENGTH = "depends on the run's number of steps, which follows from"
LR = "torch.optim.lr_scheduler"
RULES = (
    Only("optim_args", (None,), "arguments of an optimizer as a text", "policy.optimizer.kwargs"),
    Only("neftune_noise_alpha", (None, 0), "NEFTune's noise", "null"),
    Ignored("lr_scheduler_kwargs lr_scheduler_kwargs.* adam_beta1 adam_beta2 adam_epsilon weight_decay learning_rate"),
    Ignored("max_grad_norm warmup_steps warmup_ratio lr_scheduler_type optim"),
)


def translate(t: Translator, length: RunLength) -> None:
    """Translate the optimizer and its schedule."""
    name, rate = t.get("optim"), t.get("learning_rate")
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": t.get("weight_decay")}
    if name in ADAMW or name in IN_32_BITS:
        kwargs |= {"betas": [t.get("adam_beta1"), t.get("adam_beta2")], "eps": t.get("adam_epsilon")}
        t.put("policy.optimizer.name", "torch.optim.AdamW", "optim")
        if name in IN_32_BITS:
            t.change(f"optim={name}", "the optimizer's state is float32, which is more exact and needs more memory")
    elif name == "sgd":
        t.put("policy.optimizer.name", "torch.optim.SGD", "optim")
    else:
        t.lacks("optim", name, "this optimizer by TRL's fields", "adamw_torch, or policy.optimizer.name of Hetstep")
    t.put("policy.optimizer.kwargs", kwargs, "optim")
    for ours, theirs in (
        ("lr", "learning_rate"),
        ("weight_decay", "weight_decay"),
        ("eps", "adam_epsilon"),
        ("betas", "adam_beta1"),
    ):
        if (origin := t.origins.get(theirs)) and ours in kwargs:
            t.our_origins[f"policy.optimizer.kwargs.{ours}"] = f"{origin} ({theirs})"
    if t.get("weight_decay"):
        t.change("weight_decay", "applies to all weights; transformers leaves out biases and norms")
    t.put("policy.max_grad_norm", t.get("max_grad_norm"), "max_grad_norm")
    _schedule(t, length)
    apply(t, RULES)


def _warm_up(t: Translator, length: RunLength) -> int | None:
    """Return the steps of the warm-up; None if they follow from a length that is not known."""
    number = t.get("warmup_steps") or 0
    share = t.get("warmup_ratio") or 0
    if number >= 1:
        return math.ceil(int(number) / length.updates)
    share = number or share
    if not share:
        return 0
    return None if length.steps is None else math.ceil(share * length.steps)


def _schedule(t: Translator, length: RunLength) -> None:
    style, given = t.get("lr_scheduler_type"), t.get("lr_scheduler_kwargs") or {}
    warm_up, steps = _warm_up(t, length), length.steps
    decays = style not in ("constant", "constant_with_warmup")
    if (decays and steps is None) or warm_up is None:
        _without_length(t, "lr_scheduler_type" if decays else "warmup_steps", style, length)
        return
    warm_up = 0 if style == "constant" else warm_up
    parts, starts = _decay(t, style, given, max(1, (steps or 1) - warm_up), t.get("learning_rate"))
    if warm_up:
        # LinearLR cannot start at 0.
        rise = {"name": f"{LR}.LinearLR", "kwargs": {"start_factor": 1e-12, "end_factor": 1.0, "total_iters": warm_up}}
        flat = {"name": f"{LR}.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}}
        parts, starts = [rise, *(parts or [flat])], [warm_up, *(start + warm_up for start in starts)]
    value = parts[0] if len(parts) == 1 else [*parts, {"milestones": starts}] if parts else None
    t.put("policy.scheduler", value, "lr_scheduler_type")


def _without_length(t: Translator, key: str, style: str, length: RunLength) -> None:
    """Report a schedule that depends on a length that is not known. It is an error only once the data are here."""
    if length.data_are_here:
        text = f"{NEEDS_LENGTH} the number of records, which is not known; expected a number of steps. Try --max_steps STEPS"
        t.problem(key, "missing-value", f"got {style}, which {text}")
    else:
        text = (
            f"{NEEDS_LENGTH} data that are not on this machine. The plan has a constant rate, and no job is submitted without"
        )
        t.change(f"{key}={style}", f"the schedule {text} the data; --max_steps STEPS sets the number of steps")


def _decay(t: Translator, style: str, given: dict[str, Any], steps: int, rate: float) -> tuple[list[dict[str, Any]], list[int]]:
    """Return (schedules after the warm-up, the steps at which the second and later ones begin). steps: after the warm-up."""
    given = dict(given)
    parts: list[dict[str, Any]] = []
    starts: list[int] = []
    if style == "linear":
        parts = [{"name": f"{LR}.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps}}]
    elif style in ("cosine", "cosine_with_min_lr") or (style == "cosine_with_restarts" and given.get("num_cycles", 1) == 1):
        waves = given.pop("num_cycles", 0.5)
        if style != "cosine_with_restarts" and waves != 0.5:
            t.lacks("lr_scheduler_kwargs", {"num_cycles": waves}, "several waves of the learning rate", "num_cycles=0.5")
        least = given.pop("min_lr", None)
        share = given.pop("min_lr_rate", None)
        least = least if least is not None else (share or 0.0) * rate
        parts = [{"name": f"{LR}.CosineAnnealingLR", "kwargs": {"T_max": steps, "eta_min": least}}]
    elif style == "polynomial":
        if (end := given.pop("lr_end", 1e-7)) > 1e-7:
            t.lacks("lr_scheduler_kwargs", {"lr_end": end}, "a polynomial decay to a rate above 0", "lr_end=0")
        parts = [{"name": f"{LR}.PolynomialLR", "kwargs": {"total_iters": steps, "power": given.pop("power", 1.0)}}]
    elif style == "warmup_stable_decay":
        parts, starts = _stable_decay(t, given, steps)
    elif style not in ("constant", "constant_with_warmup"):
        t.lacks("lr_scheduler_type", style, "this schedule", f"one of: {SCHEDULES}")
        return [], []
    if given:
        t.lacks("lr_scheduler_kwargs", given, f"these arguments of {style}", "null")
    return parts, starts


def _stable_decay(t: Translator, given: dict[str, Any], steps: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Return transformers' warmup_stable_decay after its warm-up: a constant rate, then a cosine or a line to the end."""
    decay = given.pop("num_decay_steps", None)
    kind, least, waves = given.pop("decay_type", "cosine"), given.pop("min_lr_ratio", 0.0), given.pop("num_cycles", 0.5)
    given.pop("num_stable_steps", None)
    if not isinstance(decay, int) or kind not in ("cosine", "linear") or waves != 0.5 or not 0 < decay <= steps:
        t.lacks("lr_scheduler_kwargs", {"num_decay_steps": decay, "decay_type": kind}, "this decay", "num_decay_steps=STEPS")
        return [], []
    flat = {"name": f"{LR}.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}}
    end = {"name": f"{LR}.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": least, "total_iters": decay}}
    if kind == "cosine":
        end = {"name": f"{LR}.CosineAnnealingLR", "kwargs": {"T_max": decay, "eta_min": least * t.get("learning_rate")}}
    return ([flat, end], [steps - decay]) if decay < steps else ([end], [])
