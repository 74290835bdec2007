"""Translate `distillation`: on-policy distillation from teachers, without rewards.

verl's loss forward_kl_topk is our algorithm distillation. Its policy gradient with k1 is GRPO with the estimator opd, whose
advantages are the log-ratios of teacher and policy.
"""

from __future__ import annotations

import os
from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import scored_files
from launch.recipes.verl.verl_defaults import ACTOR

KEY, LOSS = "distillation", "distillation.distillation_loss"
TEACHERS = f"{KEY}.teacher_models"
RULES = (
    Done(f"{KEY}.enabled {LOSS}.loss_mode {LOSS}.topk {LOSS}.use_task_rewards {LOSS}.use_policy_gradient"),
    Changed(f"{LOSS}.loss_max_clamp {LOSS}.log_prob_min_clamp", (None,), "a token's loss has no bound"),
    Only(f"{LOSS}.policy_loss_mode", ("vanilla", None), "this loss of distillation", "vanilla"),
    Ignored(f"{LOSS}.* {KEY}.teacher_key"),
    Ignored(f"{KEY}.nnodes {KEY}.n_gpus_per_node", "teachers take turns on the train ranks, with the policy's layout"),
    Ignored(f"{KEY}.*"),
)


def name(t: Translator) -> str:
    """Return our algorithm: distillation, or grpo with teachers."""
    return "grpo" if t.get(f"{LOSS}.use_policy_gradient") is True else "distillation"


def translate(t: Translator, algorithm: str) -> None:
    """Translate the loss and the teachers. verl's defaults: loss_mode=k3, use_task_rewards=true, topk=32."""
    mode, gradient = t.get(f"{LOSS}.loss_mode", "k3"), t.get(f"{LOSS}.use_policy_gradient") is True
    if t.get(f"{LOSS}.use_task_rewards", True) is True:
        t.lacks(f"{LOSS}.use_task_rewards", True, "distillation together with rewards", "false")
    if mode != ("k1" if gradient else "forward_kl_topk"):
        instead = "forward_kl_topk, or k1 with use_policy_gradient=true"
        t.lacks(f"{LOSS}.loss_mode", mode, "this divergence from the teacher", instead)
    if gradient:
        t.put("grpo.adv_estimator.name", "opd", f"{LOSS}.use_policy_gradient")
        for side in ("min", "max"):
            theirs = f"{LOSS}.clip_ratio_{'low' if side == 'min' else 'high'}"
            t.put(f"loss_fn.ratio_clip_{side}", t.get(theirs, 0.2), theirs)
        t.change(
            f"{LOSS}.loss_mode=k1",
            "advantages compare the teacher with the policy before the step; verl's with the current one",
        )
    else:
        t.put("loss_fn.kl_type", "forward", f"{LOSS}.loss_mode")
        t.put("loss_fn.zero_outside_topk", True, f"{LOSS}.loss_mode")
        t.put("distillation.topk_logits_k", t.get(f"{LOSS}.topk", 32), f"{LOSS}.topk")
        t.change(f"{LOSS}.topk", "the teacher's probabilities of its top k tokens are normalized to 1; verl's are not")
        if t.get(f"{ACTOR}.loss_agg_mode") != "token-mean":
            t.change(f"{ACTOR}.loss_agg_mode", "the divergence is a mean over all tokens of an update")
    _teachers(t, gradient)
    apply(t, RULES)


def _teachers(t: Translator, gradient: bool) -> None:
    teachers = {name: one for name, one in (t.get(TEACHERS) or {}).items() if isinstance(one, dict) and one.get("model_path")}
    if not teachers:
        t.problem(TEACHERS, "missing-value", f"got no model_path; expected {TEACHERS}.teacher_model.model_path=FOLDER")
    for name, one in teachers.items():
        path = f"{TEACHERS}.{name}.model_path"
        model = os.path.expanduser(str(one["model_path"]))
        if len(teachers) == 1 and not gradient:
            t.put("teacher.model_name", model, path)
            continue
        environments: list[Any] = list(t.layer.get("env", {}))
        if len(teachers) > 1:
            score = scored_files.score_of(str(one.get("key") or name))
            environments = [score.name] if score else [name]
        for environment in environments:
            t.put(f"on_policy_distillation.teachers.{environment}.model_name", model, path)
