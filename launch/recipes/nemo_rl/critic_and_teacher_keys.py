"""Translate PPO's critic (`value`) and distillation's teacher (`teacher`), whose sections have all keys of a policy in NeMo-RL.

In Hetstep both have the policy's parallel sizes and batches. A key whose value differs from the policy's gives a note, or a
problem if the results would differ. Keys that NeMo-RL would only use to train or generate with such a model alone have no
effect.
"""

from __future__ import annotations

from typing import Any

from launch.recipes.nemo_rl import generation_keys, megatron_keys, policy_keys
from launch.recipes.translation.rules import Only, Rule, Same, Switch, apply, fits, if_set, under
from launch.recipes.translation.translator import Translator

LAYOUT = {
    "megatron": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    ),
    "dtensor": ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
}
OWN = (
    Switch("dtensor_cfg.lora_cfg.*", policy_keys.LORA_OPTION, "false: only the policy has adapters"),
    Switch("megatron_cfg.peft.*", policy_keys.LORA_OPTION, "false: only the policy has adapters"),
    Same("hf_config_overrides", if_set),
    Same("precision hf_config_overrides.*"),
)


def critic(t: Translator) -> None:
    """Translate the section `value`. Add a problem if the critic's results would differ."""
    backend = _model(t, "value", "the critic")
    if backend is None:
        return
    for name in ("train_global_batch_size", "max_total_sequence_length"):
        policy_value, value = t.get(f"policy.{name}"), t.get(f"value.{name}")
        if value not in (None, policy_value):
            t.lacks(f"value.{name}", value, "separate batches of the critic", f"policy.{name}, {policy_value}")
    t.consume("value.reward_model_cfg.enabled")  # a critic always is one
    kind = t.consume("value.reward_model_cfg.reward_model_type", "regression")
    if kind != "regression":
        message = f"got {kind}; expected regression, since a critic gives one number"
        t.problem("value.reward_model_cfg.reward_model_type", "not-a-choice", message)
    if backend == "megatron":
        _megatron_optimizer(t)
    else:
        for name in ("max_grad_norm", "optimizer", "scheduler"):
            t.copy(f"value.{name}")
    _rest(t, "value")


def teacher(t: Translator) -> None:
    """Translate the section `teacher`. The list `teachers` is of distillation on texts, by projection between vocabularies."""
    if (teachers := t.get("teachers")) is not None:
        instead = "on-policy distillation: the section teacher with loss_fn.kl_type=gold, or grpo.adv_estimator.name=opd"
        t.lacks("teachers", "a list", "distillation on the texts of a data set, by projection between vocabularies", instead)
        t.put("teacher.model_name", teachers[0].get("model_name") if teachers else None, "teachers")
        for section in ("teachers", "teacher", "loss_fn"):
            t.consume(section)
        return
    if _model(t, "teacher", "the teacher") is None:
        return
    # In NeMo-RL each model's own temperature divides its logits; without `generation` none does.
    policy_value, value = (t.get(f"{section}.generation.temperature", 1.0) for section in ("policy", "teacher"))
    if policy_value != value:
        message = f"got {value}; expected policy.generation.temperature, {policy_value}, which applies to the teacher too"
        t.problem("teacher.generation.temperature", "contradiction", message)
    _rest(t, "teacher")


def _model(t: Translator, section: str, model: str) -> str | None:
    """Translate the model's name, and return its backend in NeMo-RL; None, with a problem, if the recipe lacks the section.

    Adds a note if the model's layout differs from the policy's. model: the model's description for messages.
    """
    if t.get(section) is None:
        t.consume(section)
        t.problem(section, "missing-value", f"is not given; {section}.model_name selects {model}")
        return None
    policy_keys.check_model_name(t, f"{section}.model_name")
    t.copy(f"{section}.model_name")
    backend, policy_backend = ("megatron" if t.on(f"{s}.megatron_cfg.enabled") else "dtensor" for s in (section, "policy"))
    sizes = {name: t.get(f"{section}.{backend}_cfg.{name}") for name in LAYOUT[backend]}
    differing = [
        f"{name}={size}"
        for name, size in sizes.items()
        if size is not None and (backend != policy_backend or size != t.get(f"policy.{backend}_cfg.{name}"))
    ]
    if differing:
        t.change(
            f"{section}.{backend}_cfg", f"{model} has the parallel sizes of the policy; in NeMo-RL: {', '.join(differing)}"
        )
    t.consume(f"{section}.{'dtensor' if backend == 'megatron' else 'megatron'}_cfg")
    apply(t, under(section, OWN))
    return backend


def _rest(t: Translator, section: str) -> None:
    """Add problems for features that are not supported for the policy either, and ignore all other keys of a policy."""
    rules: tuple[Rule, ...] = (*policy_keys.MODEL, *policy_keys.DTENSOR, *megatron_keys.MEGATRON)
    trained = megatron_keys.OPTIMIZER_RULES if section == "value" else ()
    asking = [rule for rule in (*rules, *trained) if isinstance(rule, Only | Switch) and "_parallel_size" not in rule.keys]
    apply(t, under(section, asking))
    rules += (*megatron_keys.OPTIMIZER_RULES, *megatron_keys.SCHEDULER_RULES, *policy_keys.LORA)
    rules += under("generation", (*generation_keys.GENERATION, *generation_keys.VLLM_RULES))
    patterns = [pattern for rule in rules for pattern in rule.patterns] + ["generation.colocated.*"]
    for key, _ in list(t.unconsumed_leaves()):
        below = key.removeprefix(f"{section}.")
        if key.startswith(f"{section}.") and any(fits(pattern, below) for pattern in patterns):
            t.consumed.add(key)


def _megatron_optimizer(t: Translator) -> None:
    """Translate a critic's Megatron-Core optimizer into torch's, which our critic uses, with the same learning rates."""
    key = "value.megatron_cfg"
    o, s = (dict(t.get(f"{key}.{name}") or {}) for name in ("optimizer", "scheduler"))
    for name in ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay"):
        if o.get(name) is None:
            t.problem(f"{key}.optimizer.{name}", "missing-value", "is not given; NeMo-RL has no default for it")
            return
    name, style = o.get("optimizer", "adam"), s.get("lr_decay_style", "linear" if s else "constant")
    if name != "adam" or style != "constant":
        instead = "adam with a learning rate that is constant after its warm-up"
        t.lacks(f"{key}.optimizer", f"{name} with a {style} rate", "this optimizer", instead)
        return
    start, end = s.get("start_weight_decay"), s.get("end_weight_decay")
    if start != end:
        instead = "the same value as end_weight_decay"
        t.lacks(f"{key}.scheduler.start_weight_decay", f"{start}, which becomes {end}", "a weight decay that changes", instead)
        return
    decay = s.get("end_weight_decay", o["weight_decay"])  # Megatron-Core uses the schedule's value
    kwargs = {"lr": o["lr"], "betas": [o["adam_beta1"], o["adam_beta2"]], "eps": o["adam_eps"], "weight_decay": decay}
    t.put("value.optimizer.name", "torch.optim.AdamW", f"{key}.optimizer.optimizer")
    t.put("value.optimizer.kwargs", kwargs, f"{key}.optimizer")
    t.put("value.max_grad_norm", o.get("clip_grad") or None, f"{key}.optimizer.clip_grad")
    steps = megatron_keys.warm_up_iters(t, f"{key}.scheduler", s.get("lr_decay_iters"), "ppo")
    warm_up = _warm_up(o["lr"], s.get("lr_warmup_init") or 0.0, steps)
    t.put("value.scheduler", warm_up, f"{key}.scheduler.lr_warmup_iters")


def _warm_up(lr: float, begin: float, steps: int) -> list[dict[str, Any]] | None:
    """Return torch's schedule that rises linearly from `begin` to lr in `steps` steps.

    LinearLR cannot start at 0, so it starts at lr * 1e-12 or above.
    """
    if not steps:
        return None
    linear = {"start_factor": min(max(begin / lr, 1e-12), 1.0), "end_factor": 1.0, "total_iters": steps}
    return [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": linear},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}},
        {"milestones": [steps]},
    ]
