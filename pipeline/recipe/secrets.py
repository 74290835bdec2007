"""Find secrets, by the name of their variable or by their form, and redact them in texts.

Secrets travel only in the environment. sbatch passes the submitting shell's environment to the job (--export=ALL, its default),
also where a site sets SBATCH_EXPORT or SLURM_EXPORT_ENV to NONE: launch/executors/slurm_environment.py hides both. Or keep the
token in a file that its library reads (`hf auth login`, `wandb login`).

Left out: the output of C libraries, and secrets in another form, such as base64.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.recipe.problems import Problem

NAMES = re.compile(
    r"(\w*_)?(TOKEN|API_?KEY|ACCESS_KEY|PRIVATE_KEY|SECRET|SECRET_KEY|SECRET_ACCESS_KEY|PASSWORD|PASSWD|CREDENTIALS?)"
    r"|\w*PASSWORD\w*|HUGGING_FACE_HUB_TOKEN|HETSTEP_SECRET"
)
"""Names of environment variables that hold a secret: whole names, in capitals."""
VALUES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})"  # GitHub, GitLab
    r"|\b(?:sk|nvapi|wandb_v1|xox[abpr])-[\w-]{16,}|\bwandb_v1_\w{16,}"  # OpenAI and others, NVIDIA, Slack, W&B
    r"|\bA[KS]IA[0-9A-Z]{16}\b"  # AWS
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password@ in an address
)
"""Secrets by their form: the prefixes that providers give their tokens."""
ASSIGNMENT = re.compile(rf"\b({NAMES.pattern})=(?=[^\s,'\"])")
"""An assignment to a secret variable inside a longer text."""
SHORTEST = 8
"""Shortest secret that is searched for in texts, in characters: shorter ones would match everywhere."""
ADVICE = "export it in the shell that submits: the job has that shell's environment"


def is_secret(variable: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return NAMES.fullmatch(re.sub(r"\W", "x", variable)) is not None  # a name may contain dashes and dots


def in_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return value -> name of each variable that holds a secret, longest values first."""
    names = {value: name for name, value in environment.items() if is_secret(name) and len(value) >= SHORTEST}
    return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def redact(text: str, values: Mapping[str, str] | None = None) -> str:
    """Return the text with *** in place of secrets. values: value -> name; None: the result of `in_environment`."""
    for value in in_environment() if values is None else values:
        text = text.replace(value, "***")
    return VALUES.sub("***", text)


def redact_values(value: Any) -> Any:
    """Return a value as JSON types, with *** in place of secrets in its texts. Other types become texts."""
    if isinstance(value, Mapping):
        return {str(key): redact_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_values(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float) else redact(str(value))


def problems(tree: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """Yield a problem for each secret in a recipe; it does not show the secret. tree: the recipe as nested dicts and lists."""
    values = in_environment(environment)
    for keys, value in _leaves((), tree):
        if not isinstance(value, str) or not value:
            continue
        key = ".".join(keys)
        variable = next((name for secret, name in values.items() if secret in value), None)
        if len(keys) > 1 and keys[-2] == "env_vars" and is_secret(keys[-1]):
            why = f"a recipe is written to disk and shown, so it may not hold a secret; {ADVICE}"
        elif variable:
            why = f"holds the value of the variable {variable}; a recipe may not hold a secret. Ranks inherit the variable"
        elif VALUES.search(value) or ASSIGNMENT.search(value):
            why = f"looks like a secret, and a recipe is written to disk and shown; {ADVICE}"
        else:
            continue
        yield Problem(key, "secret-in-recipe", why)


def _leaves(keys: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves((*keys, str(key)), inner)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _leaves((*keys, str(i)), inner)
    else:
        yield keys, value
