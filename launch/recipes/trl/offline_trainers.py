"""Translate SFT, DPO, KTO and reward models: their losses, and the lengths of their sequences."""

from __future__ import annotations

from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator

PREFERENCES = {  # TRL's loss -> keys of dpo
    "sigmoid": {"preference_loss": "sigmoid"},
    "sigmoid_norm": {"preference_loss": "sigmoid", "preference_average_log_probs": True},
    "ipo": {"preference_loss": "ipo"},
}
RULES = {
    "sft": (
        Done("max_length truncation_mode packing packing_strategy completion_only_loss assistant_only_loss shuffle_dataset"),
        Only("loss_type", ("nll", "chunked_nll"), "dynamic fine-tuning (DFT)", "nll"),
        Changed("eos_token", (None,), "the chat template ends turns, and the tokenizer's end token texts"),
        Ignored("dataset_text_field"),
    ),
    "dpo": (
        Done("max_length truncation_mode beta loss_type loss_weights label_smoothing rpo_alpha reference_free"),
        Only("f_divergence_type", ("reverse_kl", None), "other divergences than the reverse KL", "reverse_kl"),
        Only("ld_alpha", (None, 1.0, 1), "weights by length (LD-DPO)", "null"),
        Only("use_weighting", (False, None), "weights by the policy (WPO)", "false"),
        Only("sync_ref_model", (False, None), "a reference policy that changes", "false"),
        Ignored("max_prompt_length max_completion_length"),
    ),
    "kto": (
        Done("max_length beta loss_type desirable_weight undesirable_weight"),
        Only("sync_ref_model", (False, None), "a reference policy that changes", "false"),
    ),
    "reward": (
        Done("max_length"),
        Only("center_rewards_coefficient", (None, 0, 0.0), "a penalty that centers rewards", "null"),
        Changed("eos_token", (None,), "the chat template ends turns"),
    ),
}


def translate(t: Translator, trainer: str) -> None:
    """Translate a trainer that learns from a data set."""
    _length(t, trainer)
    if trainer == "sft":
        _sft(t)
    elif trainer == "dpo":
        _dpo(t)
    elif trainer == "kto":
        _kto(t)
    apply(t, RULES[trainer])


def _length(t: Translator, trainer: str) -> None:
    longest = t.get("max_length")
    if not isinstance(longest, int):
        text = f"got {longest}; expected a number of tokens. Try --max_length TOKENS"
        t.problem("max_length", "missing-value", text)
        return
    t.put("policy.max_total_sequence_length", longest, "max_length")
    t.put("data.max_input_seq_length", longest, "max_length")
    t.put("data.overlong_prompts", "drop", "max_length")
    if trainer != "reward":  # whose data TRL filters too
        t.change(f"max_length={longest}", "longer sequences are left out; TRL cuts them")
    if t.on("packing"):
        tokens = t.get("per_device_train_batch_size") * longest
        t.put("policy.sequence_packing.train_mb_tokens", tokens, "packing")
        text = (
            f"an update has policy.train_global_batch_size records, packed; TRL's has as many rows of {longest} tokens, each of"
        )
        t.change("packing=true", f"{text} several records. policy.train_global_batch_size=N sets another size")


def _sft(t: Translator) -> None:
    if t.get("completion_only_loss") is False:
        t.lacks("completion_only_loss", False, "a loss on prompts", "true, or a column of whole texts, --dataset_text_field")
    if not t.on("assistant_only_loss"):
        text = "of `messages`, the loss counts the assistant's turns; TRL counts all turns"
        t.change("assistant_only_loss=false", text)


def _dpo(t: Translator) -> None:
    kinds, weights = t.get("loss_type"), t.get("loss_weights")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    weights = weights if isinstance(weights, list) else [1.0] * len(kinds) if weights is None else [weights]
    if len(weights) != len(kinds):
        text = f"got {len(weights)} weights; expected one for each of: {', '.join(map(str, kinds))}"
        t.problem("loss_weights", "contradiction", text)
        return
    given: dict[Any, float] = dict(zip(kinds, weights, strict=True))
    likelihood = given.pop("sft", 0.0) + (t.get("rpo_alpha") or 0.0)
    others = [kind for kind in given if kind not in PREFERENCES]
    if others or len(given) != 1:
        feature = f"the loss {others[0]}" if others else "several preference losses"
        t.lacks("loss_type", ", ".join(map(str, kinds)), feature, f"one of: {', '.join(PREFERENCES)}, alone or with sft")
        return
    ((kind, weight),) = given.items()
    for ours, value in PREFERENCES[kind].items():
        t.put(f"dpo.{ours}", value, "loss_type")
    t.put("dpo.preference_loss_weight", weight, "loss_weights")
    t.put("dpo.sft_loss_weight", likelihood, "loss_type")
    t.put("dpo.sft_average_log_probs", likelihood != 0, "loss_type")
    if likelihood:
        t.change("loss_type=sft", "the likelihood is averaged within each chosen answer; TRL averages over all of their tokens")
    t.put("dpo.reference_policy_kl_penalty", t.get("beta"), "beta")
    t.put("dpo.label_smoothing", t.get("label_smoothing") if kind != "ipo" else 0.0, "label_smoothing")
    t.put("dpo.reference_free", t.on("reference_free"), "reference_free")


def _kto(t: Translator) -> None:
    kinds = ("kto", "apo_zero_unpaired")
    if (kind := t.get("loss_type")) not in kinds:
        t.lacks("loss_type", kind, f"the loss {kind}", f"one of: {', '.join(kinds)}")
        return
    ours = {"preference_loss": "loss_type", "reference_policy_kl_penalty": "beta"}
    for key, field in (ours | {name: name for name in ("desirable_weight", "undesirable_weight")}).items():
        t.put(f"kto.{key}", t.get(field), field)
    if kind == "kto":
        text = "the KL divergence is a mean over the whole update, whose answers are rotated; TRL's over each microbatch"
        t.change("loss_type=kto", text)
    text = "a pair's two answers follow one another; TRL lists the chosen answers of a thousand records before the rejected"
    t.change("paired data", text)
