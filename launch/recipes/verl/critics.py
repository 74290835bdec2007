"""Translate `critic`: its model, optimizer and loss. It has the policy's layout and batches."""

from __future__ import annotations

import os

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import optimizers
from launch.recipes.verl.verl_defaults import ACTOR, MODEL

SAME_AS_POLICY = "a critic with another value than the policy"
RULES = under(
    "critic",
    (
        Done("cliprange_value grad_clip model.path loss_agg_mode ppo_mini_batch_size ppo_epochs"),
        Only("loss_scale_factor", (None,), "a constant divisor of the loss", "null"),
        Changed("ulysses_sequence_parallel_size", (1, None), "the critic has the parallel sizes of the policy"),
        Ignored("fsdp.* megatron.* model.* strategy pad_to_length use_remove_padding checkpoint.* enable nccl_timeout"),
    ),
)


def translate(t: Translator, engine: str, steps: int | None) -> None:
    """Translate the critic. steps: of the run; None if not known."""
    path = t.get("critic.model.path")
    if isinstance(path, str):
        t.put("value.model_name", os.path.expanduser(path), "critic.model.path")
    else:
        t.put("value.model_name", os.path.expanduser("~/models/deepseek-llm-7b-chat"), f"{MODEL}.path")  # verl's own default
    optimizers.translate(t, "critic.optim", "value", engine, steps)
    clip = t.get("critic.optim.clip_grad") if engine == "megatron" else t.get("critic.grad_clip")
    t.put("value.max_grad_norm", clip, "critic.grad_clip")
    t.put("value_loss_fn.cliprange", t.get("critic.cliprange_value"), "critic.cliprange_value")
    for name in ("ppo_mini_batch_size", "ppo_epochs"):
        own, policy = t.get(f"critic.{name}"), t.get(f"{ACTOR}.{name}")
        if own is not None and own != policy:
            t.lacks(f"critic.{name}", own, SAME_AS_POLICY, f"{ACTOR}.{name}, {policy}")
    aggregation = t.get("critic.loss_agg_mode", t.get(f"{ACTOR}.loss_agg_mode"))
    if aggregation != "token-mean":
        t.change(f"critic.loss_agg_mode={aggregation}", "the critic's loss is a mean over all tokens of an update")
    apply(t, RULES)
