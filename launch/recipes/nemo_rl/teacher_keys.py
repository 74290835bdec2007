"""Translate `on_policy_distillation`, the section of several teachers, which GRPO reads if its advantage estimator is opd.

In NeMo-RL a teacher scores the rollouts of an agent of NeMo Gym, on nodes of its own. Here it scores an environment's rollouts,
on the train ranks and with the policy's layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from launch.recipes.nemo_rl import megatron_keys, policy_keys
from launch.recipes.translation.rules import Ignored, fits, under
from launch.recipes.translation.translator import Translator
from pipeline.recipe.values import leaves

SECTION, ESTIMATOR = "on_policy_distillation", "grpo.adv_estimator.name"
PLACED = f"{SECTION}.non_colocated_teachers"
SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
SPEED = ("moe_shared_expert_overlap", "sequence_parallel", "activation_checkpointing")
UNREAD = ("num_nodes", "gpus_per_node", "micro_batch_size", "precision")  # placement; NeMo-RL does not read the precision
WITHOUT_EFFECT = tuple(
    pattern for rule in under("policy", megatron_keys.MEGATRON) if isinstance(rule, Ignored) for pattern in rule.patterns
)


def translate(t: Translator) -> None:
    """Translate the section, which has no effect unless the advantage estimator is opd."""
    if t.get(ESTIMATOR) != "opd":
        if t.on(f"{SECTION}.enabled"):
            t.ignore(SECTION, f"{ESTIMATOR} is not opd, so teachers have no effect")
        t.consume(SECTION)
        return
    if not t.on(f"{SECTION}.enabled"):
        t.problem(f"{SECTION}.enabled", "missing-value", f"is not true, but {ESTIMATOR}=opd needs teachers")
    overrides = t.get("policy.hf_config_overrides")
    agents = f"{SECTION}.teacher_model_by_agent_name"
    for name in t.get(agents) or {}:
        policy_keys.check_model_name(t, f"{agents}.{name}")
        t.put(f"{SECTION}.teachers.{name}.model_name", t.get(f"{agents}.{name}"), f"{agents}.{name}")
        if overrides:  # NeMo-RL makes a teacher's configuration from the policy's
            t.put(f"{SECTION}.teachers.{name}.hf_config_overrides", overrides, "policy.hf_config_overrides")
    t.change(agents, "an agent is an environment here: the env_name of a data set")
    if t.get(f"{SECTION}.default_teacher_alias") is not None and not t.on(f"{SECTION}.strict_agent_name_match"):
        t.copy(f"{SECTION}.default_teacher_alias")
    if t.get(PLACED):
        t.change(
            PLACED,
            "teachers take turns on the train ranks, with the policy's parallel sizes; in NeMo-RL they have separate nodes",
        )
    _settings(t)
    names = ("enabled", "teacher_model_by_agent_name", "default_teacher_alias", "strict_agent_name_match")
    for name in (*names, "deduplicate_shared_teacher_checkpoints", "non_colocated_teachers"):
        t.consume(f"{SECTION}.{name}")


def _settings(t: Translator) -> None:
    """Add a problem for each Megatron-Core key of a teacher that may change log-probs and differs from the policy's."""
    for key, name, value in _megatron_keys(t):
        equal = value == t.get(f"policy.megatron_cfg.{name}")
        unread = any(fits(pattern, f"policy.megatron_cfg.{name}") for pattern in WITHOUT_EFFECT)
        if not equal and not unread and name not in (*SIZES, *SPEED, *UNREAD):
            t.lacks(key, value, "a Megatron-Core setting of a teacher alone", "the policy's value")


def _megatron_keys(t: Translator) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, its name in policy.megatron_cfg, value) for each setting of all teachers or of a single teacher."""
    sections = [f"{PLACED}.default_teacher_cfg"]
    sections += [f"{PLACED}.teacher_overrides.{name}" for name in t.get(f"{PLACED}.teacher_overrides") or {}]
    for section in sections:
        for key, value in leaves(t.get(section), section) if t.get(section) else ():
            yield key, key.removeprefix(f"{section}.").removeprefix("megatron_cfg_overrides."), value
