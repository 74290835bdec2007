"""Read a configuration of TRL: a YAML file, or a script that starts a trainer, with the command line's flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.recipes.foreign import ForeignSource
from launch.recipes.translation import foreign_tree, leaf_types, long_options, shell_script
from launch.recipes.trl import trl_defaults, trl_translation
from launch.recipes.trl.trl_defaults import ACCELERATE, ALGORITHMS, LACKING, RENAMED, SCRIPTS, TRAINERS
from pipeline.config import Problem, RecipeError, config_tree
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.loading import Layers

LAUNCHER = ("num_processes", "num_machines", "nproc_per_node", "nnodes", "config_file", "accelerate_config", "config")
"""Options of accelerate, torchrun and `trl` that are read. The others place processes, and have no effect."""
UNREAD = (
    "main_process_port main_process_ip machine_rank mixed_precision multi_gpu gpu_ids dynamo_backend use_deepspeed"
    " zero3_init_flag zero_stage master_port master_addr node_rank rdzv_backend rdzv_endpoint rdzv_id standalone"
    " deepspeed_multinode_launcher"
)
NAMES_OF_A_RUN = ("output_dir", "run_name", "project", "hub_model_id", "logging_dir")
"""Fields in whose values an unknown part, such as the date, does not matter."""


@dataclass(frozen=True)
class TrlConfig:
    """A configuration before TRL's defaults."""

    tree: ConfigMapping = field(default_factory=ConfigMapping)
    trainer: str | None = None  # a name of TRAINERS or LACKING; None: not known yet
    launcher: Mapping[str, Any] = field(default_factory=dict)  # options of LAUNCHER
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # as of `shell_script.Command`


def read(source: ForeignSource) -> Layers:
    """Translate a configuration of TRL into our keys."""
    ours, flags, variables = _arguments(source)
    config = TrlConfig(source.tree) if source.is_yaml else _of_script(source, variables)
    config = _with_flags(config, flags, source.path)
    config, trainer = _with_trainer(config, ours, source.path)
    defaults = trl_defaults.of(trainer)
    merged = config_tree.merge(_renamed(defaults, None), _normalized(config.tree))
    examples = {key: value for key, value in defaults.items() if key not in trl_defaults.SEVERAL_TYPES}
    problems = list(leaf_types.replace_wrong(merged, examples, trl_defaults.NULLABLE))
    tree = foreign_tree.resolve(merged)
    tree = replace(tree, environment={**config.environment, **tree.environment})
    own = {key: origin for key, origin in tree.origins.items() if origin}
    keys = {key: getattr(node, "value", None) for key, node in ours}
    processes = _processes(config.launcher, keys, source.path)
    t = trl_translation.translate(tree.values, own, trainer, processes, keys)
    wrong = {problem.key for problem in problems}
    others = [problem for problem in t.problems if problem.key not in wrong]
    translation = replace(t, changed=[*config.notes, *t.changed], problems=others)
    return foreign_tree.as_layers(tree, translation, source.path, ours, problems, default_origin="TRL's default")


# ---- the command line ------------------------------------------------------------------------------------------------------


def _arguments(source: ForeignSource) -> tuple[list[tuple[str, ConfigNode]], list[str], dict[str, str]]:
    """Split the command line's arguments. Return (our keys, words of TRL's flags, variables of the script)."""
    ours, flags, variables = [], [], {}
    for word in source.arguments:
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"\w+", key) and not source.is_yaml and shell_script.mentions(source.text, key):
            variables[key] = value
        elif equals and not word.startswith("-") and (foreign_tree.is_our_key(key) or re.fullmatch(r"\w+(\.\w+)+", key)):
            ours += config_tree.parse_overrides([word])
        elif equals and re.fullmatch(r"\w+", key) and not flags:
            flags.append(f"--{word}")
        else:
            flags.append(word)
    return ours, flags, variables


def _with_flags(config: TrlConfig, words: Sequence[str], path: Path) -> TrlConfig:
    """Return the configuration with flags of the command line, the file of `--config` below them."""
    options, others = long_options.parse(words)
    if others:
        message = f"got '{others[0]}'; expected a flag of TRL, such as --learning_rate 1e-6, or key=value"
        raise RecipeError(Problem(others[0], "bad-format", message, COMMAND_LINE))
    return _with_options(config, [(name, value, COMMAND_LINE) for name, value, _ in options], path)


def _with_options(config: TrlConfig, options: Iterable[tuple[str, Any, str]], path: Path) -> TrlConfig:
    """Return the configuration with options (name, value, origin). path: the recipe, beside which files are searched."""
    launcher, layer = dict(config.launcher), ConfigMapping()
    for name, value, origin in options:
        if name in LAUNCHER:
            launcher[name] = value
        elif name not in UNREAD.split():
            layer.children[name] = config_tree.from_plain(value, origin)
    tree = config.tree
    if isinstance(name := launcher.pop("config", None), str):
        tree = config_tree.merge(tree, config_tree.load_file(_beside(path, name, "--config")))
    return replace(config, tree=config_tree.merge(tree, layer), launcher=launcher)


def _beside(path: Path, name: str, key: str) -> Path:
    """Return a file that a recipe names relative to its working directory: this one, or a folder above the recipe's."""
    folders = (Path(), *path.absolute().parents)
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        message = f"got {name}; expected a file below the working directory, or below a folder that holds the script"
        raise RecipeError(Problem(key, "file-not-found", message, config_tree.short_path(path)))
    return found


# ---- scripts ---------------------------------------------------------------------------------------------------------------


def starts(words: Sequence[str]) -> tuple[int, str] | None:
    """Return (index of its first argument, trainer) of a command that starts a trainer of TRL; None for another one."""
    for number, word in enumerate(words):
        if Path(word).name == "trl" and words[number + 1 : number + 2] and words[number + 1] in (*TRAINERS, *LACKING):
            return number + 2, words[number + 1]
        if word.startswith("trl.scripts.") or (word.endswith(".py") and trainer_of(Path(word).stem)):
            return number + 1, trainer_of(word.removeprefix("trl.scripts.") if "/" not in word else Path(word).stem) or ""
    return None


def trainer_of(stem: str) -> str | None:
    """Return the trainer that a script starts, by its name, such as `grpo` for train_grpo; None if the name tells none."""
    stem = stem.removesuffix(".py").lower()
    if stem in SCRIPTS:
        return SCRIPTS[stem]
    names = sorted((*TRAINERS, *LACKING, *SCRIPTS), key=len, reverse=True)
    named = [name for name in names if re.search(rf"(?:^|_){name}(?:_|$)", stem)]
    return SCRIPTS.get(named[0], named[0]) if named else None


def _of_script(source: ForeignSource, variables: Mapping[str, str]) -> TrlConfig:
    command = shell_script.find_command(source.text, source.path, lambda words: starts(words) is not None, variables)
    if command is None:
        message = "has no command that starts a trainer of TRL; expected one such as `trl grpo --model_name_or_path NAME`"
        raise RecipeError(Problem("recipe", "bad-format", message, config_tree.short_path(source.path)))
    found = starts(command.words)
    assert found is not None
    first, trainer = found
    problems = []
    options, _ = long_options.parse(command.words[: first - 1])
    theirs, others = long_options.parse(command.words[first:])
    config = TrlConfig(trainer=trainer, notes=tuple(_notes(command)), environment=command.environment)
    read = [(name, value, command.origin(word)) for name, value, word in options if name in LAUNCHER and name != "config"]
    for name, value, word in theirs:
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        unknown = [text for text in texts if not command.is_known(text)]
        if unknown and name in NAMES_OF_A_RUN:
            value = command.known_part(unknown[0]).rstrip("_-")
        elif unknown:
            problems += filter(None, [command.problem(f"--{name}", unknown[0])])
            continue
        read.append((name, value, command.origin(word)))
    for word in others:
        if word:
            message = f"got '{word}'; expected an option such as --learning_rate 1e-6"
            problems.append(Problem("recipe", "bad-format", message, command.origin(word)))
    if problems:
        raise RecipeError(*problems)
    return _with_options(config, read, source.path)


def _notes(command: shell_script.Command) -> list[str]:
    names = sorted(name for name in command.read if name not in ("HOME", "PATH", "USER", "PWD"))
    return [f"{', '.join(names)}: the script reads these variables of your environment"] if names else []


# ---- the trainer -----------------------------------------------------------------------------------------------------------


def _with_trainer(config: TrlConfig, ours: list[tuple[str, ConfigNode]], path: Path) -> tuple[TrlConfig, str]:
    """Return (the configuration with a note of how its trainer is known, the trainer). Raises RecipeError for none here.

    The trainer is that of the sub-command or of the script's name, else of `algorithm` on the command line, else the only one
    that has all of the fields, else the one that names the file or a folder of it.
    """
    shown = config_tree.short_path(path)
    algorithm = next((getattr(node, "value", None) for key, node in reversed(ours) if key == "algorithm"), None)
    fitting = _fitting(config.tree)
    if config.trainer is not None:
        trainer = config.trainer
    elif algorithm is not None:
        trainers = [name for name in (*fitting, *ALGORITHMS) if ALGORITHMS[name] == algorithm]
        trainer = trainers[0] if trainers else str(algorithm)
    elif len(fitting) == 1:
        trainer = fitting[0]
    else:
        named = [trainer_of(part) for part in (path.stem, *(folder.name for folder in path.absolute().parents[:3]))]
        trainer = next((name for name in named if name in fitting or name in LACKING), None)
        if trainer is None:
            trainers = ", ".join(fitting or TRAINERS)
            message = f"the fields fit several trainers of TRL: {trainers}. Try algorithm=grpo, sft, dpo or rm"
            raise RecipeError(Problem("algorithm", "missing-value", message, shown))
        config = replace(config, notes=(*config.notes, f"algorithm: the trainer is TRL's {trainer}, by the name of the file"))
    if trainer not in TRAINERS:
        feature = LACKING.get(trainer, "this trainer of TRL")
        message = f"got {trainer}; Hetstep does not support {feature}. Try one of: {', '.join(TRAINERS)}"
        raise RecipeError(Problem("algorithm", "unsupported", message, shown))
    return config, trainer


def _fitting(tree: ConfigMapping) -> list[str]:
    """Return the trainers that have all fields of a configuration that some trainer has."""
    own = {name: trl_defaults.fields(name) for name in TRAINERS}
    some = {RENAMED.get(key, key) for key in tree.children} & frozenset().union(*own.values())
    return [name for name, names in own.items() if some <= names]


def _renamed(values: Mapping[str, Any], origin: str | None) -> ConfigMapping:
    """Return defaults as a tree, each value a leaf."""
    tree = ConfigMapping()
    for key, value in values.items():
        tree.children[key] = ConfigValue(value, origin)
    return tree


def _normalized(tree: ConfigMapping) -> ConfigMapping:
    """Return the tree with today's names of fields, and with numbers where the file has them as texts, such as 1e-6."""
    children: dict[str, ConfigNode] = {}
    for key, node in tree.children.items():
        if isinstance(node, ConfigValue):
            node = replace(node, value=long_options.value(node.value) if key != "chat_template" else node.value)
        if key not in ("env", "defaults"):  # `env` sets variables of TRL's process
            children[RENAMED.get(key, key)] = node
    return ConfigMapping(children)


# ---- processes -------------------------------------------------------------------------------------------------------------


def _processes(launcher: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> trl_translation.Processes:
    """Return the number of processes: of our own keys, of the launcher's options, or of accelerate's file; else 1."""
    gpus, nodes = ours.get("cluster.train.gpus_per_node"), ours.get("cluster.train.nodes")
    if isinstance(gpus, int) and gpus > 0:
        return trl_translation.Processes(gpus * (nodes or 1), nodes or 1, "cluster.train on the command line", is_ours=True)
    machines = launcher.get("num_machines", launcher.get("nnodes", 1))
    machines = machines if isinstance(machines, int) else 1
    if isinstance(number := launcher.get("num_processes"), int):
        return trl_translation.Processes(number, machines, f"--num_processes {number}")
    if isinstance(number := launcher.get("nproc_per_node"), int):
        return trl_translation.Processes(number * machines, machines, f"--nproc_per_node {number}")
    name = launcher.get("config_file", launcher.get("accelerate_config"))
    if name is None:
        return trl_translation.Processes(1, 1, "")
    if Path(str(name)).stem in ACCELERATE:
        number = ACCELERATE[Path(str(name)).stem]
        return trl_translation.Processes(number, 1, f"{Path(str(name)).name} of TRL, {number} processes")
    values = config_tree.load_file(_beside(path, str(name), "--config_file")).plain()
    number, machines = values.get("num_processes", 1), values.get("num_machines", 1)
    return trl_translation.Processes(int(number), int(machines), f"{name}, num_processes {number}")
