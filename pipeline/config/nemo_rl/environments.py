"""`env`: what judges answers. There the key says which class that is; ours has it in `kind`."""

from __future__ import annotations

from pipeline.config.data import MATH_VERIFIERS
from pipeline.config.nemo_rl.features import Feature
from pipeline.config.nemo_rl.ledger import Ledger
from pipeline.config.nemo_rl.rules import Changed, Only, Rule, apply, ignored, same, under

MATH: tuple[Rule, ...] = (
    Only(("verifier_type",), ("math", None), Feature.VERIFIER, "math"),
    Only(("stop_strings",), (None, []), Feature.STOP_STRINGS, "null"),
    ignored("num_workers"),
)
REWARD_MODEL: tuple[Rule, ...] = (
    same("model_name", "precision", "hf_config_overrides.*", "tokenizer.name", "tokenizer.chat_template_kwargs.*"),
    Only(("checkpoint_path",), (None,), Feature.PRETRAINED, "model_name may be a folder"),
    Only(("reward_model_cfg.enabled",), (True,), Feature.ENVIRONMENT, "true"),
    Only(("reward_model_cfg.reward_model_type",), ("bradley_terry",), Feature.ENVIRONMENT, "bradley_terry"),
    Changed(("dtensor_cfg.tensor_parallel_size", "dtensor_cfg.context_parallel_size"), (1,), "it is cut as the policy is"),
    ignored("dtensor_cfg.*", "megatron_cfg.*", "resources.*", "dynamic_batching.*", "sequence_packing.*", "generation.*"),
    ignored("batch_size", "logprob_batch_size", "max_model_len", "max_grad_norm", "offload_optimizer_for_logprob", "processor"),
    ignored("enabled", "optimizer.*", "scheduler.*", "make_sequence_length_divisible_by", "tokenizer.use_fastokens"),
)
KINDS = {"math": ("math", MATH), "math_default": ("math", MATH), "reward_model": ("reward_model", REWARD_MODEL)}

LACKING = {
    "math_multi_reward": Feature.SEVERAL_REWARDS,
    "nemo_gym": Feature.GYM,
    "sliding_puzzle_game": Feature.MULTI_TURN,
    "vlm": Feature.MULTIMODAL,
}


def translate(ledger: Ledger, names: list[str]) -> None:
    """names: of the environments that a data set's answers go to."""
    if ledger.get("env.should_use_nemo_gym") is True:
        ledger.lacks("env.should_use_nemo_gym", True, Feature.GYM)
    for key in ("should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples"):
        ledger.take(f"env.{key}")
    for name in ledger.get("env") or {}:
        if name in LACKING and (name in names or name == "sliding_puzzle_game"):
            ledger.lacks(f"env.{name}", "a section", LACKING[name])
            ledger.take(f"env.{name}")
        elif name in names and name not in KINDS:
            ledger.lacks(f"env.{name}", "a section", Feature.ENVIRONMENT, f"one of: {', '.join(KINDS)}")
            ledger.take(f"env.{name}")
        elif name not in names and isinstance(ledger.get(f"env.{name}"), dict):
            ledger.take(f"env.{name}")
            ledger.ignore(f"env.{name}", "no data set's answers go there")
    for name in names:
        if name in KINDS:
            _known(ledger, name)


def _known(ledger: Ledger, name: str) -> None:
    key = f"env.{name}"
    if not isinstance(ledger.get(key), dict):
        ledger.problem(key, f"not given, but a data set's env_name is {name}")
        return
    kind, rules = KINDS[name]
    ledger.put(f"{key}.kind", kind, key)
    if kind == "math":
        _verifier(ledger, f"{key}.math_verify_impl", f"{key}.kwargs.math_verify_impl")
    if kind == "reward_model":
        ledger.put(f"{key}.served_by", "reward", f"{key}.resources.num_nodes")
    apply(ledger, under(key, rules))


def _verifier(ledger: Ledger, theirs: str, ours: str) -> None:
    verifier = ledger.take(theirs)
    if verifier in MATH_VERIFIERS:
        ledger.put(ours, verifier, theirs)
    elif verifier is not None:
        ledger.lacks(theirs, verifier, Feature.VERIFIER, f"one of: {', '.join(MATH_VERIFIERS)}")
