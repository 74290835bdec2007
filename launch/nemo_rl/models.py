"""PPO's critic (`value`) and distillation's teacher (`teacher`), which there are described as fully as the policy is.

Ours are cut as the policy is, and their batches are the policy's. What says otherwise is told, or refused where the numbers
would differ. Keys that only say how such a model would train or generate by itself say nothing.
"""

from __future__ import annotations

from typing import Any

from launch.nemo_rl import generation, megatron, policy
from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Only, Rule, Switch, apply, fits, patterns_of, same, under

LAYOUT = {
    "megatron": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    ),
    "dtensor": ("tensor_parallel_size", "context_parallel_size"),
}
BATCHES = ("train_global_batch_size", "max_total_sequence_length")

OWN = (same("precision", "hf_config_overrides.*"),)
ADAPTERS = Switch("dtensor_cfg.lora_cfg", Feature.LORA_OPTION, "false: only the policy has adapters")

NEVER = ("logprob_batch_size", "train_micro_batch_size", "tokenizer.name", "tokenizer.chat_template_kwargs.*", "max_grad_norm")


def critic(ledger: Ledger) -> None:
    backend = _model(ledger, "value", "the critic")
    if backend is None:
        return
    for name in BATCHES:
        ours, its = ledger.get(f"policy.{name}"), ledger.get(f"value.{name}")
        if its not in (None, ours):
            ledger.lacks(f"value.{name}", its, Feature.VALUE_BATCHES, f"policy.{name}, {ours}")
    ledger.take("value.reward_model_cfg.enabled")  # a critic is one in any case
    kind = ledger.take("value.reward_model_cfg.reward_model_type", "regression")
    if kind != "regression":
        ledger.problem("value.reward_model_cfg.reward_model_type", f"{kind}, but a critic gives one number; regression")
    if backend == "megatron":
        _megatron_optimizer(ledger)
    else:
        for name in ("max_grad_norm", "optimizer", "scheduler"):
            ledger.copy(f"value.{name}")
    apply(ledger, under("value", OWN))
    _rest(ledger, "value")


def teacher(ledger: Ledger) -> None:
    if ledger.get("teachers") is not None:
        ledger.lacks("teachers", "a list", Feature.CROSS_TOKENIZER, "the section teacher, with one of the policy's vocabulary")
        teachers = ledger.get("teachers")
        ledger.put("teacher.model_name", teachers[0].get("model_name") if teachers else None, "teachers")
        for section in ("teachers", "teacher", "loss_fn"):
            ledger.take(section)
        return
    if _model(ledger, "teacher", "the teacher") is None:
        return
    apply(ledger, under("teacher", OWN))
    _teacher_temperature(ledger)
    _rest(ledger, "teacher")


def _teacher_temperature(ledger: Ledger) -> None:
    """There, each model's own key divides its logits, and nothing does where `generation` is not given."""
    key = "generation.temperature"
    policy_has, teacher_has = (ledger.get(f"{section}.{key}", 1.0) for section in ("policy", "teacher"))
    if policy_has != teacher_has:
        ledger.problem(
            f"teacher.{key}",
            f"{teacher_has}, but the teacher's distribution is at the policy's temperature; {policy_has} as in policy.{key}",
        )


def _model(ledger: Ledger, section: str, what: str) -> str | None:
    """Its name, and what is told of its layout. The backend it has there; None if the section is not given."""
    if ledger.get(section) is None:
        ledger.take(section)
        ledger.problem(section, f"not given; {what} is described there, by {section}.model_name")
        return None
    policy.check_model_name(ledger, f"{section}.model_name")
    ledger.copy(f"{section}.model_name")
    its = "megatron" if ledger.get(f"{section}.megatron_cfg.enabled") is True else "dtensor"
    ours = "megatron" if ledger.get("policy.megatron_cfg.enabled") is True else "dtensor"
    other = [
        f"{name}={size}"
        for name in LAYOUT[its]
        if (size := ledger.get(f"{section}.{its}_cfg.{name}")) is not None
        and (its != ours or size != ledger.get(f"policy.{its}_cfg.{name}"))
    ]
    if other:
        ledger.change(f"{section}.{its}_cfg", f"{what} is cut as the policy is; there: {', '.join(other)}")
    ledger.take(f"{section}.{'dtensor' if its == 'megatron' else 'megatron'}_cfg")
    apply(ledger, under(section, (ADAPTERS,)))
    if ledger.get(f"{section}.hf_config_overrides") is None:
        ledger.take(f"{section}.hf_config_overrides")
    return its


def _rest(ledger: Ledger, section: str) -> None:
    """What would ask for a feature if the policy had it asks for it here; other keys of a policy say nothing."""
    generation_rules = under("generation", (*generation.GENERATION, *generation.VLLM))
    rules: tuple[Rule, ...] = (*policy.MODEL, *policy.DTENSOR, *megatron.MEGATRON)
    trained = megatron.OPTIMIZER if section == "value" else ()
    asking = [rule for rule in (*rules, *trained) if isinstance(rule, Only | Switch) and not _of_layout(rule)]
    apply(ledger, under(section, asking))
    rules += (*megatron.OPTIMIZER, *megatron.SCHEDULER, *policy.LORA, *generation_rules)
    known = [pattern for rule in rules for pattern in patterns_of(rule)]
    known += [*policy.TAKEN, *megatron.TAKEN, *(f"generation.{key}" for key in generation.TAKEN), *NEVER]
    for key, _ in list(ledger.unmet()):
        below = key.removeprefix(f"{section}.")
        if key.startswith(f"{section}.") and any(fits(pattern, below) for pattern in known):
            ledger.met.add(key)


def _of_layout(rule: Only | Switch) -> bool:
    """Whether the rule is about how a model is cut, which is the policy's."""
    return isinstance(rule, Only) and any(pattern.endswith("_parallel_size") for pattern in rule.patterns)


def _megatron_optimizer(ledger: Ledger) -> None:
    """In torch's words, which our critic's keys are: the same rates, step by step."""
    key = "value.megatron_cfg"
    o, s = (dict(ledger.get(f"{key}.{name}") or {}) for name in ("optimizer", "scheduler"))
    missing = [name for name in ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay") if name not in o]
    if missing:
        ledger.problem(f"{key}.optimizer.{missing[0]}", "not given; NeMo-RL has no default for it")
        return
    name, style = o.get("optimizer", "adam"), s.get("lr_decay_style", "linear" if s else "constant")
    if name != "adam" or style != "constant":
        given = f"{name} with a {style} rate"
        ledger.lacks(f"{key}.optimizer", given, Feature.OPTIMIZER, "adam, and a rate that is constant after its warm-up")
        return
    if s.get("start_weight_decay") != s.get("end_weight_decay"):
        given = f"{s.get('start_weight_decay')}, which becomes {s.get('end_weight_decay')}"
        ledger.lacks(f"{key}.scheduler.start_weight_decay", given, Feature.OPTIMIZER, "the same value as end_weight_decay")
        return
    decay = s.get("end_weight_decay", o["weight_decay"])  # Megatron-Core takes the schedule's
    kwargs = {"lr": o["lr"], "betas": [o["adam_beta1"], o["adam_beta2"]], "eps": o["adam_eps"], "weight_decay": decay}
    ledger.put("value.optimizer.name", "torch.optim.AdamW", f"{key}.optimizer.optimizer")
    ledger.put("value.optimizer.kwargs", kwargs, f"{key}.optimizer")
    ledger.put("value.max_grad_norm", o.get("clip_grad") or None, f"{key}.optimizer.clip_grad")
    steps = megatron.warm_up_iters(ledger, f"{key}.scheduler", s.get("lr_decay_iters"), "ppo")
    warm_up = _warm_up(o["lr"], s.get("lr_warmup_init") or 0.0, steps)
    ledger.put("value.scheduler", warm_up, f"{key}.scheduler.lr_warmup_iters")


def _warm_up(lr: float, begin: float, steps: int) -> list[dict[str, Any]] | None:
    """Linear from `begin` to lr in so many steps. LinearLR cannot begin at 0: it begins at 1e-12 of lr."""
    if not steps:
        return None
    start = max(begin / lr, 1e-12)
    return [
        {
            "name": "torch.optim.lr_scheduler.LinearLR",
            "kwargs": {"start_factor": min(start, 1.0), "end_factor": 1.0, "total_iters": steps},
        },
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 0}},
        {"milestones": [steps]},
    ]
