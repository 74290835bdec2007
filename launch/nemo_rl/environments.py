"""`env`: what judges answers. There the key says which class that is; ours has it in `kind`."""

from __future__ import annotations

from typing import get_args, get_type_hints

from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Changed, Only, Rule, apply, ignored, same, under
from pipeline.config import kind_class
from pipeline.config.layers import RECIPES

MATH: tuple[Rule, ...] = (
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

PUZZLE = "sliding_puzzle_game"
PUZZLE_PROMPT = str(RECIPES / "prompts/sliding_puzzle.txt")

LACKING = {
    "math_multi_reward": Feature.SEVERAL_REWARDS,
    "nemo_gym": Feature.GYM,
    "vlm": Feature.MULTIMODAL,
}


def translate(ledger: Ledger, names: list[str]) -> None:
    """names: of the environments that a data set's answers go to."""
    if ledger.get("env.should_use_nemo_gym") is True:
        ledger.lacks("env.should_use_nemo_gym", True, Feature.GYM)
    for key in ("should_use_nemo_gym", "should_log_nemo_gym_responses", "should_mask_flagged_samples"):
        ledger.take(f"env.{key}")
    if isinstance(ledger.get(f"env.{PUZZLE}"), dict):
        _puzzle(ledger)
        names = [PUZZLE]
    for name in ledger.get("env") or {}:
        if name == PUZZLE:
            continue
        if name in LACKING and name in names:
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
    if kind == "math":
        kind = _verifier_type(ledger, key)
    ledger.put(f"{key}.kind", kind, key)
    if kind == "math":
        _verifier(ledger, f"{key}.math_verify_impl", f"{key}.kwargs.math_verify_impl")
    if kind == "reward_model":
        ledger.put(f"{key}.served_by", "reward", f"{key}.resources.num_nodes")
    apply(ledger, under(key, rules))


def _puzzle(ledger: Ledger) -> None:
    """Theirs draws its boards in a script of its own (run_grpo_sliding_puzzle.py), whatever `data` says of data sets."""
    key = f"env.{PUZZLE}"
    given = (ledger.take(key) or {}).get("cfg", {})
    game = given.get("game_config", {})
    ledger.put(f"{key}.kind", "sliding_puzzle", key)
    if "max_moves" in given:
        ledger.put(f"{key}.kwargs.max_moves", given["max_moves"], f"{key}.cfg.max_moves")
    prompts = ledger.get("grpo.num_prompts_per_step", 1) * ledger.get("grpo.max_num_steps", 1)
    for split, size in (("train", prompts), ("validation", ledger.get("grpo.max_val_samples") or 256)):
        dataset = {
            "dataset_name": "sliding_puzzle",
            "split": split,
            "env_name": PUZZLE,
            "prompt_file": PUZZLE_PROMPT,
            "kwargs": {"size": size, "game_config": dict(game)},
        }
        ledger.put(f"data.{split}", dataset, f"{key}.cfg.game_config")
    ledger.change(f"{key}.cfg.game_config", "boards are data.train and data.validation, drawn by the data set sliding_puzzle")
    ledger.change(key, "a turn ends with the model's end of turn; there with the stop string </action>")
    ledger.change(key, "what the game tells is a turn of the chat template; there it stands bare behind what the model said")


def _verifier_type(ledger: Ledger, key: str) -> str:
    """Our kind for an environment of theirs of class math."""
    verifier, known = ledger.take(f"{key}.verifier_type"), _choices("multiple_choice", "verifier_type")
    if verifier in known:
        ledger.put(f"{key}.kwargs.verifier_type", verifier, f"{key}.verifier_type")
        ledger.take(f"{key}.math_verify_impl")  # says nothing there either
        ledger.change(f"{key}.verifier_type", "of several letters the last said counts; there the first")
        return "multiple_choice"
    if verifier not in ("math", None):
        ledger.lacks(f"{key}.verifier_type", verifier, Feature.VERIFIER, f"one of: {', '.join(('math', *known))}")
    return "math"


def _verifier(ledger: Ledger, theirs: str, ours: str) -> None:
    verifier, known = ledger.take(theirs), _choices("math", "math_verify_impl")
    if verifier in known:
        ledger.put(ours, verifier, theirs)
    elif verifier is not None:
        ledger.lacks(theirs, verifier, Feature.VERIFIER, f"one of: {', '.join(known)}")


def _choices(kind: str, argument: str) -> tuple[str, ...]:
    """Return the values that an argument of one of our environments may have."""
    return get_args(get_type_hints(kind_class(kind).Arguments)[argument])
