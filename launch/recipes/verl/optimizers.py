"""Translate optimizers and learning-rate schedules: those of FSDP, and Megatron-Core's."""

from __future__ import annotations

from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator

TORCH_NAMES = ("AdamW", "Adam", "SGD")
MEGATRON_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
UNKNOWN_LENGTH = (
    "the length of the run follows from its data and is not known before; expected a number of steps. Try"
    " trainer.total_training_steps=STEPS"
)
RULES = (
    Done("lr weight_decay betas clip_grad lr_warmup_steps lr_warmup_steps_ratio total_training_steps"),
    Done("optimizer optimizer_impl lr_scheduler_type warmup_style min_lr_ratio num_cycles init_lr_ratio"),
    Done("lr_warmup_init lr_decay_steps lr_decay_style min_lr"),
    Only("weight_decay_incr_style", ("constant", None), "a weight decay that changes", "constant"),
    Only("zero_indexed_step", (True, None), "a schedule that starts at its second step", "true"),
    Only("use_layer_wise_distributed_optimizer", (False, None), "this optimizer", "false"),
    Changed(
        "override_optimizer_config.optimizer_cpu_offload override_optimizer_config.optimizer_offload_fraction"
        " override_optimizer_config.offload_fraction",
        (False, None, 0),
        "the optimizer's state stays on the GPUs, which needs more memory",
    ),
    Changed(
        "use_precision_aware_optimizer override_optimizer_config.use_precision_aware_optimizer main_grads_dtype exp_avg_dtype"
        " exp_avg_sq_dtype master_weights store_param_remainders override_optimizer_config.decoupled_weight_decay",
        (False, None, "fp32", True),
        "main weights, gradients and the optimizer's state are float32",
    ),
    Ignored("override_optimizer_config.overlap_cpu_optimizer_d2h_h2d override_optimizer_config"),
    Ignored("lr_wsd_decay_style lr_wsd_decay_steps use_checkpoint_opt_param_scheduler muon_* _target_"),
)


def translate(t: Translator, section: str, ours: str, engine: str, steps: int | None) -> None:
    """Translate an optimizer's section. ours: our section, `policy` or `value`. steps: of the run; None if not known."""
    total = t.get(f"{section}.total_training_steps")
    steps = total if isinstance(total, int) and total > 0 else steps
    betas: Any = t.get(f"{section}.betas")
    if not isinstance(betas, list) or len(betas) != 2:
        t.problem(f"{section}.betas", "wrong-type", f"got {betas}; expected two numbers, as in [0.9,0.999]")
        t.consume(section)
    elif engine == "megatron":
        _megatron(t, section, ours, steps)
    else:
        _torch(t, section, ours, steps)
    apply(t, under(section, RULES))


def _warm_up(t: Translator, section: str, steps: int | None) -> int:
    """Return the steps of the warm-up. A number of steps above 0 goes before a share of the run, as in verl."""
    number, share = t.get(f"{section}.lr_warmup_steps"), t.get(f"{section}.lr_warmup_steps_ratio")
    if isinstance(number, int) and number > 0:
        return number
    if not share:
        return 0
    if steps is None:
        key = f"{section}.lr_warmup_steps_ratio"
        t.problem(key, "missing-value", f"got {share} of the run; {UNKNOWN_LENGTH}, or {section}.lr_warmup_steps=STEPS")
        return 0
    return int(share * steps)


def _torch(t: Translator, section: str, ours: str, steps: int | None) -> None:
    name, package = t.get(f"{section}.optimizer"), t.get(f"{section}.optimizer_impl")
    if package != "torch.optim" or name not in TORCH_NAMES:
        t.lacks(f"{section}.optimizer", f"{package}.{name}", "this optimizer", "torch.optim.AdamW")
    more = t.get(f"{section}.override_optimizer_config")
    kwargs = {"lr": t.get(f"{section}.lr"), "betas": t.get(f"{section}.betas"), "eps": 1e-8}
    kwargs |= {"weight_decay": t.get(f"{section}.weight_decay")}
    if isinstance(more, dict):
        kwargs |= {key: value for key, value in more.items() if key in ("eps", "fused", "amsgrad", "betas", "foreach")}
        for key in more:
            t.consume(f"{section}.override_optimizer_config.{key}") if key in kwargs else None
    if name == "SGD":
        kwargs = {"lr": kwargs["lr"], "weight_decay": kwargs["weight_decay"]}
    t.put(f"{ours}.optimizer.name", f"torch.optim.{name}", f"{section}.optimizer")
    t.put(f"{ours}.optimizer.kwargs", kwargs, section)
    for key in ("lr", "betas", "weight_decay"):
        if origin := t.origins.get(f"{section}.{key}"):
            t.our_origins[f"{ours}.optimizer.kwargs.{key}"] = f"{origin} ({section}.{key})"
    style = t.get(f"{section}.warmup_style") or t.get(f"{section}.lr_scheduler_type")
    start = t.get(f"{section}.init_lr_ratio") or 0.0
    warm_up, decay = _warm_up(t, section, steps), None
    if style == "cosine":
        if t.get(f"{section}.num_cycles") not in (0.5, None):
            t.lacks(f"{section}.num_cycles", t.get(f"{section}.num_cycles"), "several waves of the learning rate", "0.5")
        if steps is None:
            t.problem(f"{section}.lr_scheduler_type", "missing-value", f"got cosine; {UNKNOWN_LENGTH}")
            return
        least = (t.get(f"{section}.min_lr_ratio") or 0.0) * kwargs["lr"]
        kwargs = {"T_max": max(1, steps - warm_up), "eta_min": least}
        decay = {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": kwargs}
    elif style != "constant":
        t.lacks(f"{section}.lr_scheduler_type", style, "this schedule", "constant or cosine")
    t.put(f"{ours}.scheduler", schedule(warm_up, start if style == "cosine" else 0.0, decay), f"{section}.lr_scheduler_type")


def schedule(warm_up: int, start: float, decay: dict[str, Any] | None) -> Any:
    """Return torch's schedule: a linear rise from `start` times the rate in `warm_up` steps, then `decay`, else constant.

    LinearLR cannot start at 0, so it starts at 1e-12 or above.
    """
    if not warm_up:
        return decay
    linear = {"start_factor": max(start, 1e-12), "end_factor": 1.0, "total_iters": warm_up}
    constant = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}}
    first = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": linear}
    return [first, decay or constant, {"milestones": [warm_up]}]


def _megatron(t: Translator, section: str, ours: str, steps: int | None) -> None:
    """Translate Megatron-Core's optimizer; a critic's becomes torch's AdamW, which has the same steps."""
    name, style = t.get(f"{section}.optimizer"), t.get(f"{section}.lr_decay_style")
    if name != "adam":
        t.lacks(f"{section}.optimizer", name, "this optimizer", "adam")
    betas: Any = t.get(f"{section}.betas")
    if ours != "policy":
        kwargs = {"lr": t.get(f"{section}.lr"), "betas": betas, "eps": 1e-8, "weight_decay": t.get(f"{section}.weight_decay")}
        if style != "constant":
            t.lacks(f"{section}.lr_decay_style", style, "a critic's rate that decays", "constant")
        t.put(f"{ours}.optimizer.name", "torch.optim.AdamW", f"{section}.optimizer")
        t.put(f"{ours}.optimizer.kwargs", kwargs, section)
        t.put(f"{ours}.scheduler", schedule(_warm_up(t, section, steps), 0.0, None), f"{section}.lr_warmup_steps")
        return
    key = f"{ours}.megatron_cfg"
    for theirs, mine in (("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("clip_grad", "clip_grad")):
        t.put(f"{key}.optimizer.{mine}", t.get(f"{section}.{theirs}"), f"{section}.{theirs}")
    for number, beta in enumerate(betas, 1):
        t.put(f"{key}.optimizer.adam_beta{number}", beta, f"{section}.betas")
    if style not in MEGATRON_STYLES:
        t.lacks(f"{section}.lr_decay_style", style, "this schedule", f"one of: {', '.join(MEGATRON_STYLES)}")
        return
    decay = t.get(f"{section}.lr_decay_steps") or steps
    if style != "constant" and decay is None:
        t.problem(f"{section}.lr_decay_style", "missing-value", f"got {style}; {UNKNOWN_LENGTH}, or lr_decay_steps=STEPS")
        return
    t.put(f"{key}.scheduler.lr_decay_style", style, f"{section}.lr_decay_style")
    if style != "constant" and decay is not None:
        t.put(f"{key}.scheduler.lr_decay_iters", decay, f"{section}.lr_decay_steps")
    t.put(f"{key}.scheduler.lr_warmup_iters", _warm_up(t, section, decay), f"{section}.lr_warmup_steps")
    t.put(f"{key}.scheduler.lr_warmup_init", t.get(f"{section}.lr_warmup_init"), f"{section}.lr_warmup_init")
