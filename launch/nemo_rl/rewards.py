"""What becomes of rewards: their estimators of advantages, dynamic sampling, penalties on lengths, KL in the reward.

The keys have our names. Defaults of theirs that do not follow ours are set here, and where their code computes something else
than ours does, the import says so.
"""

from __future__ import annotations

from launch.nemo_rl.ledger import Ledger

ESTIMATOR = {"normalize_rewards": True, "use_leave_one_out_baseline": True, "minus_baseline": True}
"""Theirs, which do not follow the section's keys of the same names, as ours do."""

KL_CLAMPS = {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
"""Of KL in the reward, whatever loss_fn says; loss_fn's own defaults too."""


def advantages(ledger: Ledger) -> None:
    """GRPO's `adv_estimator`, which alone says how advantages are made."""
    section = "grpo.adv_estimator"
    for name, default in ESTIMATOR.items():
        if not ledger.has(f"{section}.{name}"):
            ledger.put(f"{section}.{name}", default, section)
    if ledger.get(f"{section}.name", "grpo") != "grpo":
        return
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        given, made = ledger.get(f"grpo.{name}", True), ledger.get(f"{section}.{name}", True)
        if given != made:
            ledger.change(f"grpo.{name}={_yaml(given)}", f"advantages are made by {section}.{name}={_yaml(made)}, as there")


def differences(ledger: Ledger, algorithm: str) -> None:
    """Tell what is computed otherwise than there, of an algorithm that learns from rewards."""
    if ledger.get("ppo.use_dynamic_sampling") is True:
        ledger.change(
            "ppo.use_dynamic_sampling", "groups whose rewards do not vary are sampled anew; there they are trained on"
        )
    elif ledger.get("grpo.use_dynamic_sampling") is True and ledger.get("grpo.use_leave_one_out_baseline", True):
        ledger.change(
            "grpo.use_dynamic_sampling",
            "a group is kept whole if its rewards vary; there, with grpo.use_leave_one_out_baseline=true, the one answer that"
            " differs from all others is dropped from it",
        )
    _lengths(ledger, algorithm)
    if ledger.get("loss_fn.use_kl_in_reward") is True:
        _kl_in_reward(ledger, algorithm)


def _lengths(ledger: Ledger, algorithm: str) -> None:
    shaping = f"{algorithm}.reward_shaping"
    shapes = ledger.get(f"{shaping}.enabled") is True
    stops = shapes and ledger.get(f"{shaping}.stop_properly_penalty_coef") is not None
    if shapes and not stops and ledger.get(f"{algorithm}.max_rollout_turns", 1) > 1:
        ledger.change(f"{shaping}.overlong_buffer_length", "counts the tokens of all turns; there those of the first")
    for key, says in ((f"{shaping}.stop_properly_penalty_coef", stops), (f"{algorithm}.overlong_filtering", None)):
        if says if says is not None else ledger.get(key) is True:
            ledger.change(
                key,
                "an answer is cut if its last turn ended for length; there also if another did, or the reply to it has no room",
            )


def _kl_in_reward(ledger: Ledger, algorithm: str) -> None:
    if algorithm == "grpo" and ledger.get("grpo.adv_estimator.name") == "reinforce_plus_plus":
        ledger.change(
            "loss_fn.use_kl_in_reward",
            "a token answers for the KL from itself to the end of the answer, as in the paper; there for its own alone",
        )
    for name, always in KL_CLAMPS.items():
        given = ledger.get(f"loss_fn.{name}", always)
        if given != always:
            ledger.change(
                f"loss_fn.{name}={_yaml(given)}", f"bounds the KL in the reward too; there that has {always:g} always"
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
