"""NeMo-RL's recipes (https://github.com/NVIDIA-NeMo/RL, examples/configs) in our keys.

Each leaf of their resolved tree is met by one rule. It means the same; or it is translated, and told in `changed` if that
changes what it means; or it means nothing here, and is in `ignored` if somebody might miss it; or it is a problem, because it
asks for what we do not have (`features.py`), or because we do not know it. Defaults of theirs that differ from ours are set.

The sections are read by `policy`, `megatron`, `generation`, `algorithm`, `data`, `environments`, `models`, `cluster` and `run`,
in tables of rules (`rules.py`) where a table will do. Read against NeMo-RL of August 2026.

Leaves out: recipes for vision and audio, and for evaluation alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.nemo_rl import algorithm, cluster, data, environments, generation, models, policy, run
from launch.nemo_rl.features import Feature, feature_of
from launch.nemo_rl.ledger import Ledger
from pipeline.algorithms import OFFLINE

__all__ = ["Feature", "Translation", "feature_of", "translate"]


@dataclass(frozen=True)
class Translation:
    layer: dict[str, Any]  # in our keys
    origins: dict[str, str]  # of our dotted keys: "file:line", with (their key) behind it where that is another
    changed: list[str]  # what is done otherwise than there, one line each
    ignored: list[str]  # what means nothing here, one line each
    problems: list[str]  # what cannot be done; each begins with the key to change


def translate(tree: Mapping[str, Any], origins: Mapping[str, str], path: Path) -> Translation:
    """A recipe of theirs, merged and resolved, in our keys.

    origins: of the tree's dotted keys. path: the recipe's file; files it names are looked for below the folders it lies in.
    """
    ledger = Ledger(tree, origins)
    name = algorithm.named(ledger)
    if name is None:
        known = ", ".join(algorithm.NAMES)
        problem = f"algorithm: {path} has none, and no section that says it is a recipe of NeMo-RL's; one of: {known}"
        return Translation({}, {}, [], [], [problem])
    samples = name not in OFFLINE
    ledger.put("algorithm", name, name)
    judges = data.environments(ledger) if samples else []
    rewarded = "env.reward_model" if "reward_model" in judges else None
    cluster.translate(ledger, samples, rewarded)
    if name == "distillation":
        models.teacher(ledger)
    policy.translate(ledger, name, path)
    generation.translate(ledger, samples)
    algorithm.translate(ledger, name, data.translate(ledger, name, path))
    if samples:
        environments.translate(ledger, judges)
    else:
        ledger.take("env")
    if name == "ppo":
        models.critic(ledger)
    run.translate(ledger)
    _unknown(ledger)
    return Translation(ledger.layer, ledger.our_origins, ledger.changed, ledger.ignored, list(dict.fromkeys(ledger.problems)))


def _unknown(ledger: Ledger) -> None:
    known = sorted(ledger.met)
    for key, _ in ledger.unmet():
        near = difflib.get_close_matches(key, known, 1, cutoff=0.8)
        hint = f"did you mean '{near[0]}'?" if near else "leave it out"
        ledger.problem(key, f"is not a key that we know, neither ours nor NeMo-RL's; {hint}")
