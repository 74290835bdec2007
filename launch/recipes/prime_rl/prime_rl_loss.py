"""Translate the algorithm, the loss and the batches of the entry point `rl`.

The formulas are those of src/prime_rl/trainer/rl/loss.py and src/prime_rl/orchestrator/algo/grpo.py.
"""

from __future__ import annotations

from launch.recipes.prime_rl.prime_rl_defaults import LOSSES
from launch.recipes.prime_rl.prime_rl_training import values_of
from launch.recipes.translation.rules import Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator

LACKING = {
    "echo": "ECHO's loss on the environment's tokens",
    "max_rl": "MaxRL's advantages",
    "rae": "role-conditioned advantages (RAE)",
    "hierarchical_grpo": "advantages of several roles",
    "opd": "on-policy distillation from a hosted model",
    "opsd": "self-distillation",
    "sft": "supervised training on a hosted model's answers",
}
INSTEAD = {"opd": "grpo, or algorithm=distillation of Hetstep, whose teacher is a model of the job"}
GRPO = "grpo.async_grpo"
RULES = (
    Done("orchestrator.algo.type orchestrator.batch_size orchestrator.group_size orchestrator.max_off_policy_steps"),
    Done("orchestrator.train.filter_zero_advantages"),
    Only("orchestrator.algo.length_penalty", (None,), "a penalty on tokens and turns within a group", "null"),
    Only("orchestrator.algo.length_penalty.*", (), "a penalty on tokens and turns within a group", "no length_penalty"),
    Only("orchestrator.token_batch_size", (None,), "steps of a number of tokens", "batch_size"),
    Done("trainer.enable_router_replay"),
    Ignored("orchestrator.algo.sampling.source"),
)


def translate(t: Translator) -> None:
    """Translate the algorithm, its loss and its batches."""
    algorithm = t.get("orchestrator.algo.type")
    if algorithm != "grpo":
        feature = LACKING.get(str(algorithm), "this algorithm")
        t.lacks("orchestrator.algo.type", algorithm, feature, INSTEAD.get(str(algorithm), "grpo"))
        t.consume("orchestrator.algo")
    t.put("grpo.normalize_rewards", False, "orchestrator.algo.type")
    t.put("grpo.use_leave_one_out_baseline", False, "orchestrator.algo.type")
    if t.get("trainer.enable_router_replay"):
        t.put("policy.router_replay.enabled", True, "trainer.enable_router_replay")
    _loss(t)
    _batches(t)
    _staleness(t)
    apply(t, RULES)


def _loss(t: Translator) -> None:
    """Translate DPPO's loss with the penalty on the drift from the engines' policy."""
    kind = str(t.get("trainer.loss.type"))
    if kind != "default":
        feature = "a symmetric trust region on probabilities" if kind == "ipo" else "a loss of the user by prime-rl's keys"
        t.lacks("trainer.loss.type", kind, feature, "default")
        t.consume("trainer.loss")
        return
    given = values_of(t, "trainer.loss", LOSSES["default"])
    if given["adv_tau"] != 1:
        t.lacks("trainer.loss.adv_tau", given["adv_tau"], "a factor on advantages", "1.0")
    t.put("loss_fn.use_dppo", True, "trainer.loss.type")
    t.put("loss_fn.use_generation_logprobs", True, "trainer.loss.type")
    t.put("loss_fn.ratio_clip_min", given["dppo_mask_low"], "trainer.loss.dppo_mask_low")
    t.put("loss_fn.ratio_clip_max", given["dppo_mask_high"], "trainer.loss.dppo_mask_high")
    t.put("loss_fn.drift_penalty", given["kl_tau"], "trainer.loss.kl_tau")
    t.put("loss_fn.token_level_loss", True, "trainer.loss.type")
    if t.get("orchestrator.train.filter_zero_advantages") is True:
        text = (
            "tokens of answers without an advantage count in the loss's divisor and in its penalty on drift; prime-rl leaves"
            " them out, so that its gradient is larger by the inverse of the others' share"
        )
        t.change("orchestrator.train.filter_zero_advantages=true", text)


def _batches(t: Translator) -> None:
    key = "orchestrator.batch_size"
    size, (group, group_key) = t.get(key), group_size(t)
    if size is None:
        if t.get("orchestrator.token_batch_size") is None:
            t.problem(key, "missing-value", "got null; expected a number of rollouts in a step, or token_batch_size")
        return
    if size % group:
        text = f"got {size}; expected a multiple of {group_key}={group}, since a step has whole groups"
        t.problem(key, "not-divisible", text)
    t.put("grpo.num_prompts_per_step", max(1, size // group), key)
    t.put("grpo.num_generations_per_prompt", group, group_key)
    t.put("policy.train_global_batch_size", size, key)


def group_size(t: Translator) -> tuple[int, str]:
    """Return (rollouts of a task, the key that says so): the shared size, or the size that all sources have."""
    shared = t.get("orchestrator.group_size")
    sizes = {source.get("group_size", shared) for source in t.get("orchestrator.train.source") or []}
    if len(sizes) == 1 and sizes != {shared}:
        return sizes.pop(), "orchestrator.train.source"
    return shared, "orchestrator.group_size"


def _staleness(t: Translator) -> None:
    key = "orchestrator.max_off_policy_steps"
    age = t.get(key)
    t.put(f"{GRPO}.enabled", age > 0, key)
    if age > 0:
        t.put(f"{GRPO}.max_trajectory_age_steps", age, key)
        t.put(f"{GRPO}.in_flight_weight_updates", True, key)
        text = "a step trains on the oldest prompts, and drops no answer for its age; prime-rl takes the groups that end first"
        t.change(f"{key}={age}", text)
