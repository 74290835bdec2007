"""Recognize recipes of other projects, and pass each to the extra that reads it.

To add a format: write a package with a module that has `read(source: ForeignSource) -> Layers`, and add a line to `FORMATS` and
one to `EXTRAS` in `pipeline/seams/extras.py`. A format is recognized here, so that a copy without the extra can name it.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import config
from pipeline.algorithms import OFFLINE, ONLINE
from pipeline.config import Problem, RecipeError, config_tree, schema_validation
from pipeline.config.config_tree import ConfigMapping, ConfigNode
from pipeline.config.loading import Layers
from pipeline.recipe import user_files
from pipeline.seams import extras

NEVER_YAML = (*config_tree.NEVER_YAML, ".toml")
OURS = ("cluster.train", "cluster.generate", "cluster.executor", "cluster.time_min", "run_dir", "needs")  # unknown to NeMo-RL
TRLS = ("model_name_or_path", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs")
NEMO_RLS = ("cluster.num_nodes", "cluster.gpus_per_node", *ONLINE, *OFFLINE)  # every NeMo-RL recipe has one of these


@dataclass(frozen=True)
class ForeignSource:
    """A recipe's file and the command line, as a reader gets them."""

    path: Path
    arguments: tuple[str, ...]  # the command line's, in order, without those of our command such as `plan=true`

    @functools.cached_property
    def text(self) -> str:
        """Return the file's text. Raises RecipeError if it cannot be read."""
        try:
            return user_files.read_text(self.path, config_tree.MAX_YAML)
        except OSError as error:
            shown = config_tree.short_path(self.path)
            raise RecipeError(Problem("recipe", "unreadable", f"{error.strerror}", shown)) from None

    @property
    def is_yaml(self) -> bool:
        """Return whether the file's name may be a YAML file's."""
        return self.path.suffix not in NEVER_YAML

    @functools.cached_property
    def tree(self) -> ConfigMapping:
        """Return the YAML file's own keys, `defaults` included. Raises RecipeError for what is no YAML mapping."""
        return config_tree.load_file(self.path)

    @functools.cached_property
    def merged(self) -> ConfigMapping:
        """Return the YAML file merged over its `defaults:` parents. Raises RecipeError for a file that cannot be read."""
        return config_tree.load_with_parents(self.path)

    @functools.cached_property
    def pairs(self) -> list[tuple[str, ConfigNode]]:
        """Return (key, node) of each argument. Raises RecipeError for one that is not `key=value`."""
        return list(config_tree.parse_overrides(self.arguments))


@dataclass(frozen=True)
class ForeignFormat:
    """A kind of foreign recipe."""

    extra: str  # the extra whose module has `read`
    key: str  # the key that a problem names if the extra is not here
    description: str
    recognizes: Callable[[ForeignSource], bool]  # may raise RecipeError for a file that cannot be read


def _is_nemo_rl(source: ForeignSource) -> bool:
    if not source.is_yaml:
        return False
    tree = source.merged
    if difflib.get_close_matches("algorithm", [*tree.children, *_keys(source.arguments)], 1, schema_validation.SIMILAR):
        return False
    return not any(map(tree.find, OURS)) and any(map(tree.find, NEMO_RLS))


def _is_verl(source: ForeignSource) -> bool:
    if not source.is_yaml:
        trainer = r"\bverl[./][\w./]*trainer|\brecipe\.\w+\.main_"
        return source.path.suffix == ".sh" and re.search(trainer, source.text) is not None
    tree = source.tree
    if "policy" in tree.children:
        return False
    sft = all(map(tree.find, ("trainer.total_epochs", "data.train_files")))
    parents = str(getattr(tree.find("defaults"), "value", ""))  # such as [ppo_trainer, _self_]
    named = re.search(r"\b(ppo_trainer|ppo_megatron_trainer|sft_trainer_engine|actor_rollout_ref|model_engine)\b", parents)
    return "actor_rollout_ref" in tree.children or sft or named is not None


def _is_trl(source: ForeignSource) -> bool:
    if source.is_yaml:
        tree = source.tree
        return any(name in tree.children for name in TRLS) and "policy" not in tree.children and "stage" not in tree.children
    starts = r"\btrl\s+[a-z]+\s|\btrl[./]scripts[./]|\bexamples/scripts/\w+\.py|\.py\b[^#]*?\s--(model_name_or_path|config)\b"
    return source.path.suffix == ".sh" and re.search(starts, source.text, re.DOTALL) is not None


def _is_prime_rl(source: ForeignSource) -> bool:
    if source.path.suffix == ".toml":
        try:
            names = tomllib.loads(source.text).keys()
        except tomllib.TOMLDecodeError:
            return True  # whose reader says what is wrong
        return bool(names & {"orchestrator", "trainer", "optim", "train", "ckpt"}) or {"data", "model"} <= names
    return source.path.suffix == ".sh" and re.search(r"\buv run (?:\S+ )*(?:rl|sft) ", source.text) is not None


FORMATS = (
    ForeignFormat("verl", "recipe", "a configuration of verl", _is_verl),
    ForeignFormat("prime_rl", "recipe", "a configuration of prime-rl", _is_prime_rl),
    ForeignFormat("trl", "recipe", "a configuration of TRL", _is_trl),
    ForeignFormat("nemo_rl", "algorithm", "a recipe of NeMo-RL", _is_nemo_rl),  # last: it reads the parents of a file
)


def read(path: Path, arguments: Sequence[str]) -> Layers | None:
    """Return a foreign recipe as layers of our keys; None for a recipe of ours.

    Raises RecipeError for a file that is neither, and for one whose reader this copy lacks.
    """
    source = ForeignSource(path, tuple(arguments))
    if (form := recognized(source)) is not None:
        return extras.load(form.extra, form.key, f"{form.description} ({path})").read(source)
    if not source.is_yaml:
        kinds = ", ".join(form.description for form in FORMATS)
        message = f"got {path}; expected a .yaml recipe of Hetstep, or one of: {kinds}"
        if path.suffix == ".py" or ".py" in source.text:
            message += ". A Python program is not read. Try a YAML file with its arguments, as of `trl grpo --config FILE`"
        raise RecipeError(Problem("recipe", "bad-format", message))
    return None


def recognized(source: ForeignSource) -> ForeignFormat | None:
    """Return the format of a foreign recipe; None for a recipe of ours. Raises RecipeError if the file cannot be read."""
    return next((form for form in FORMATS if form.recognizes(source)), None)


def takes_options(arguments: Iterable[str]) -> bool:
    """Return whether the recipe of a command line is a foreign one, whose options, such as `--bf16`, its reader takes."""
    names = [argument.removeprefix("recipe=") for argument in arguments if argument.startswith("recipe=")]
    try:
        return bool(names) and recognized(ForeignSource(config.find(names[-1], foreign=True), ())) is not None
    except RecipeError:
        return False  # which reading the recipe reports


def _keys(arguments: Iterable[str]) -> list[str]:
    return [argument.partition("=")[0] for argument in arguments]
