"""Checks of texts of a recipe that become lines of a batch script, or names of files and variables.

Values are quoted wherever a shell reads them. A newline cannot be: sbatch's options are comments of a script, one a line.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import places
from pipeline.config.schema import Recipe

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_THE_JOB = tuple(
    f"HETSTEP_{name}"
    for name in (
        *("RUN_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "ATTEMPT", "COMPONENT", "NODE"),
        *("JOB_ID", "END_TIME", "SIGNALS"),
    )
)
"""Variables that the launcher sets for each rank; see launch/executors/base.py."""
VARIABLES = (
    *(f"cluster.{component}.env_vars" for component in ("train", "generate", "reward")),
    *("policy.megatron_cfg.env_vars", "policy.generation.vllm_cfg.env_vars"),
)
"""Keys that hold variables of ranks. `env_vars` among the kwargs of a user's own code may be anything."""
ONE_WORD = ("partition", "account", "qos")
"""Keys of a component that `scontrol show job` prints before what the batch script looks for. Blanks separate its fields."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, what else some programs end a line at, and halves of UTF-16's pairs, which no file can hold."""


def unusable(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for control characters in `name`, `cluster.*`, variables and paths, and for names of variables
    that a shell would not read as such, or that the launcher sets."""
    for key, value in _values("", dataclasses.asdict(recipe)):
        if fnmatch.fnmatchcase(key, "cluster.*.*") and key.rpartition(".")[2] in ONE_WORD and " " in (value or ""):
            yield key, f"{key}: got {value!a}; expected a name without blanks"
        if key in VARIABLES:
            yield from _bad_variables(key, value or {})
        elif key in ("name", "run_dir", "needs") or key.startswith("cluster.") or places.is_path(key):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and _CONTROL.search(text):
                    yield key, f"{key}: got {text!a}; expected a text without control characters"
    if set("%\\") & set(recipe.run_dir):
        yield "run_dir", f"run_dir: got {recipe.run_dir}; expected no % and no \\, with which Slurm and submitit write patterns"


def _values(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a recipe's nested values; variables as one mapping."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in VARIABLES:
            yield from _values(f"{key}.", value)
        else:
            yield key, value


def _bad_variables(key: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, problem), where the problems name no value, which may be a secret."""
    for name, value in variables.items():
        if not VARIABLE.fullmatch(str(name)):
            yield (
                f"{key}.{name}",
                f"{key}: got the name {name!a}; expected letters, digits and _, and no digit first, as in NCCL_DEBUG",
            )
        elif name in OF_THE_JOB:
            yield f"{key}.{name}", f"{key}: got {name}, which the launcher sets for each rank. Try without it"
        elif _CONTROL.search(value):
            yield f"{key}.{name}", f"{key}: got control characters in the value of {name}; expected a text without them"
