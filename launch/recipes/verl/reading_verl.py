"""Read a configuration of verl: a script that starts a trainer, or a YAML file, with the command line's overrides."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.recipes.foreign import ForeignSource
from launch.recipes.translation import foreign_tree, shell_script
from launch.recipes.verl import hydra_overrides, verl_defaults, verl_translation
from pipeline.config import Problem, RecipeError, config_tree
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.loading import Layers

TRAINERS = {
    "main_ppo": "ppo",
    "main_dapo": "ppo",  # in recipe/dapo, with the keys of main_ppo
    "main_ppo_sync": "ppo",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fsdp_sft_trainer": "sft",
}
"""The last part of a trainer's module -> the kind of its configuration."""
CONFIGS = {  # verl's own files that a `defaults:` list or --config-name may name -> (kind, engine)
    "ppo_trainer": ("ppo", "dp"),
    "ppo_megatron_trainer": ("ppo", "megatron"),
    "sft_trainer_engine": ("sft", "dp"),
    "_generated_ppo_trainer": ("ppo", "dp"),
    "_generated_ppo_megatron_trainer": ("ppo", "megatron"),
}
ENGINES = {"dp": "dp", "fsdp": "dp", "fsdp2": "dp", "megatron": "megatron"}
OPTIONS = {"cn": "config-name", "cp": "config-path", "cd": "config-dir"}
"""Short names of Hydra's options that have a value."""
ASSUMED = {"DEVICE": "gpu"}
"""Variables of verl's scripts that a program sets otherwise. Its scripts run on NVIDIA's GPUs or on Ascend NPUs."""
NAMES_OF_A_RUN = ("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir", "trainer.rollout_data_dir")
"""Keys in whose values an unknown part, such as the date, does not matter."""


@dataclass(frozen=True)
class VerlConfig:
    """A configuration before verl's defaults."""

    tree: ConfigMapping
    kind: str  # ppo or sft
    engine: str  # dp or megatron
    notes: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # value of a variable of the environment -> as written


def read(source: ForeignSource) -> Layers:
    """Translate a configuration of verl into our keys. An argument's key is verl's if verl knows it, else ours."""
    theirs, ours, variables = _arguments(source)
    config = _of_yaml(source) if source.is_yaml else of_script(source, variables)
    overrides = hydra_overrides.parse((word, COMMAND_LINE) for word in theirs)
    config = _with(config, overrides)
    defaults = verl_defaults.of(config.kind, config.engine)
    wrong: list[Problem] = []
    tree = foreign_tree.resolve(over_defaults(config), lambda tree: _replace_wrong_types(tree, defaults, wrong))
    tree = replace(tree, environment={**config.environment, **tree.environment})
    own = {key: origin for key, origin in tree.origins.items() if origin}
    has_environment = any(key.startswith("env.") for key, _ in ours)
    t = verl_translation.translate(tree.values, own, config.kind, config.engine, has_environment)
    translation = replace(t, changed=[*config.notes, *t.changed])
    return foreign_tree.as_layers(tree, translation, source.path, ours, wrong, default_origin="verl's default")


def _arguments(source: ForeignSource) -> tuple[list[str], list[tuple[str, ConfigNode]], dict[str, str]]:
    """Split the command line's arguments. Return (verl's overrides, our keys, variables of the script)."""
    theirs, ours, variables = [], [], {}
    for word in source.arguments:
        key, equals, value = word.partition("=")
        if equals and not source.is_yaml and re.fullmatch(r"[A-Za-z_]\w*|[1-9]\d*", key) and _is_variable(source, key):
            variables[key] = value
        elif equals and key[:1] not in "+~" and not verl_translation.knows(key) and foreign_tree.is_our_key(key):
            ours += config_tree.parse_overrides([word])
        else:
            theirs.append(word)
    return theirs, ours, variables


def _is_variable(source: ForeignSource, name: str) -> bool:
    if name.isdigit():
        return True
    return shell_script.mentions(source.text, name) and not foreign_tree.is_our_key(name)


def over_defaults(config: VerlConfig) -> ConfigMapping:
    """Return a configuration's keys over verl's defaults, which have no origin."""
    tree = ConfigMapping()
    for key, value in verl_defaults.of(config.kind, config.engine).items():
        tree.set(key, ConfigValue(value))
    return config_tree.merge(tree, config.tree)


ALSO = {  # keys that have values of other types than their default's
    "data.train_files": (list,),
    "data.val_files": (list,),
    "trainer.logger": (str,),
    "trainer.save_freq": (str,),
    "trainer.test_freq": (str,),
    "algorithm.rollout_correction.rollout_is_threshold": (str,),
    "actor_rollout_ref.model.target_modules": (list,),
    "model.target_modules": (list,),
}


def _replace_wrong_types(tree: ConfigMapping, defaults: Mapping[str, Any], found: list[Problem]) -> dict[str, Problem]:
    """Replace values of another type than their defaults' by these, so that the rest can be translated, and add problems."""
    for key, default in defaults.items():
        node = tree.find(key)
        if node is None or _fits(key, node, default):
            continue
        got = node.value if isinstance(node, ConfigValue) else "a mapping"
        expected = "a value that is no mapping" if default is None else f"a value such as {default}"
        found.append(Problem(key, "wrong-type", f"got {got}; expected {expected}", node.origin or ""))
        tree.set(key, ConfigValue(default))
    return {}


def _fits(key: str, node: ConfigNode, default: Any) -> bool:
    """Return whether a node has the type of its key's default. A default of null fits every scalar and list."""
    if isinstance(node, ConfigMapping):
        return key.endswith("override_optimizer_config")
    if node.value is None or default is None or isinstance(node.value, ALSO.get(key, ())):
        return True
    if isinstance(default, int | float) and not isinstance(default, bool):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    return isinstance(node.value, type(default))


# ---- scripts ---------------------------------------------------------------------------------------------------------------


def _trainer(words: list[str]) -> str | None:
    """Return the last part of the trainer's module in a command; None if it starts no trainer of verl."""
    modules = [re.sub(r"/|\.py$", lambda match: "." if match[0] == "/" else "", word) for word in words]
    for module in modules:
        if re.match(r"(?:.*\.)?(?:verl|recipe)\.[\w.]+$", module) and (
            "main" in module or "trainer" in module.rpartition(".")[2]
        ):
            return module
    return None


def _kind_of(words: list[str]) -> str | None:
    """Return the kind of the configuration of a command's trainer; None if the trainer is not supported."""
    module = _trainer(words) or ""
    return None if ".experimental." in module else TRAINERS.get(module.rpartition(".")[2])


def _names(find: Callable[[list[str]], str | None], words: list[str]) -> bool:
    return find(words) is not None


def of_script(source: ForeignSource, variables: Mapping[str, str]) -> VerlConfig:
    """Return what the last command of a script that starts a trainer of verl passes to it. variables: see `find_command`."""
    command = None
    for is_theirs in (_kind_of, _trainer):  # a trainer that is supported goes before verl's other programs
        if command is None:
            known = functools.partial(_names, is_theirs)
            command = shell_script.find_command(source.text, source.path, known, variables, ASSUMED)
    shown = config_tree.short_path(source.path)
    if command is None:
        message = "has no command that starts a trainer of verl; expected one such as python3 -m verl.trainer.main_ppo"
        raise RecipeError(Problem("recipe", "bad-format", message, shown))
    module = str(_trainer([str(word) for word in command.words]))
    kind = _kind_of([str(word) for word in command.words])
    if kind is None:
        what = "fully asynchronous training" if "fully_async" in module else "this trainer of verl"
        message = f"got {module}; Hetstep does not support {what}. Try a script of verl.trainer.main_ppo or sft_trainer"
        raise RecipeError(Problem("recipe", "unsupported", message, command.origin(command.words[0])))
    found = [number for number, word in enumerate(command.words) if _trainer([str(word)]) is not None]
    before, words = command.words[: found[0]], command.words[found[0] + 1 :]
    options, words = _options(words)
    pairs, problems = [], []
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if not command.is_known(word) and key not in NAMES_OF_A_RUN:
            problems += filter(None, [command.problem(key, word)])
            continue
        pairs.append((command.known_part(word).rstrip("_-") if key in NAMES_OF_A_RUN else str(word), command.origin(word)))
    if problems:
        raise RecipeError(*problems)
    config = _named_config(options, source.path, kind) or VerlConfig(ConfigMapping(), kind, "dp")
    config = _with(config, hydra_overrides.parse(pairs))
    read = sorted(name for name in command.read if name not in shell_script.OF_EVERYBODY)
    config = replace(config, notes=(*config.notes, *_notes(command, read)), environment=command.environment)
    return _with_launched_ranks(config, before, command) if kind == "sft" else config


def _options(words: list[shell_script.Argument]) -> tuple[dict[str, str], list[shell_script.Argument]]:
    """Return (value of each of Hydra's options, the other words). An option has its value after `=`, or as the next word."""
    options, others, left = {}, [], list(words)
    while left:
        word = left.pop(0)
        if not re.match(r"--?[A-Za-z]", word):
            others.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = OPTIONS.get(name, name)
        options[name] = str(left.pop(0)) if name in OPTIONS.values() and not equals and left else value
    return options, others


def _notes(command: shell_script.Command, names: list[str]) -> list[str]:
    assumed = [
        f"{name}={value}: the script asks a program for it; {name}=VALUE on the command line sets another value"
        for name, value in command.assumed.items()
    ]
    read = [f"{', '.join(names)}: the script reads these variables of your environment"] if names else []
    return assumed + read


def _with_launched_ranks(config: VerlConfig, words: list[shell_script.Argument], command: shell_script.Command) -> VerlConfig:
    """Add the nodes and GPUs that torchrun starts, since the SFT trainer has no keys for them."""
    for option, key in (("nproc[_-]per[_-]node", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
        for number, word in enumerate(words):
            if (match := re.match(rf"--{option}(?:=(.*))?$", word, re.DOTALL)) is None:
                continue
            value = match[1] or "".join(words[number + 1 : number + 2])
            if (problem := command.problem(key, value)) is not None:
                raise RecipeError(problem)
            if value.isdigit():
                config.tree.set(key, ConfigValue(int(value), command.origin(word)))
    return config


# ---- YAML ------------------------------------------------------------------------------------------------------------------


def _named_config(options: Mapping[str, str], script: Path, kind: str) -> VerlConfig | None:
    """Return the configuration that --config-name of a script names; None if it names none."""
    name = options.get("config-name", "").removesuffix(".yaml")
    if not name:
        return None
    if name in CONFIGS:
        return VerlConfig(ConfigMapping(), *CONFIGS[name])
    folders = [script.parent / options.get("config-path", "."), Path(options.get("config-path", "."))]
    for folder in folders:
        if (path := folder / f"{name}.yaml").is_file():
            return _of_file(path, kind)
    message = f"got {name}; expected a file {folders[0] / name}.yaml, or one of: {', '.join(CONFIGS)}"
    raise RecipeError(Problem("--config-name", "file-not-found", message, config_tree.short_path(script)))


def _of_yaml(source: ForeignSource) -> VerlConfig:
    kind = "ppo" if "actor_rollout_ref" in source.tree.children or "algorithm" in source.tree.children else "sft"
    return _of_file(source.path, kind)


def _of_file(path: Path, kind: str, seen: tuple[Path, ...] = ()) -> VerlConfig:
    """Return a YAML file over the files of its `defaults:` list. verl's own files and groups are `verl_defaults`."""
    shown = config_tree.short_path(path)
    if path.resolve() in seen:
        raise RecipeError(Problem("defaults", "circular", f"got a circle of files, with {path.name}", shown))
    layer = config_tree.load_file(path)
    kind, engine = CONFIGS.get(path.stem, (kind, "dp"))
    config = VerlConfig(ConfigMapping(), kind, engine)
    own_at = 0
    parents = layer.children.pop("defaults", None)
    entries = parents.value if isinstance(parents, ConfigValue) and isinstance(parents.value, list) else []
    for entry in [*entries, *(() if "_self_" in entries else ("_self_",))]:
        if entry == "_self_":
            config, own_at = replace(config, tree=config_tree.merge(config.tree, layer)), 1
        elif isinstance(entry, str) and entry.removesuffix(".yaml") in CONFIGS:
            kind, engine = CONFIGS[entry.removesuffix(".yaml")]
            config = replace(config, kind=kind, engine=engine)
        elif isinstance(entry, str) and (parent := path.parent / f"{entry.removesuffix('.yaml')}.yaml").is_file():
            below = _of_file(parent, kind, (*seen, path.resolve()))
            config = VerlConfig(config_tree.merge(config.tree, below.tree), below.kind, below.engine)
        elif isinstance(entry, dict) and (engine := _engine_of(entry)) is not None:
            config = replace(config, engine=engine)
        elif not _is_verls_group(entry):
            message = f"got {entry}; expected a file beside {path.name}, or one of verl's own: {', '.join(CONFIGS)}"
            raise RecipeError(Problem("defaults", "file-not-found", message, shown))
    assert own_at
    config.tree.children.pop("hydra", None)
    return _with(config, [])


def _engine_of(entry: Mapping[str, Any]) -> str | None:
    """Return the engine that an entry {model_engine: NAME} or {override model_engine: NAME} selects; None for other entries."""
    names = [name for key, name in entry.items() if key.removeprefix("override ").strip("/ ") == "model_engine"]
    return ENGINES.get(str(names[0])) if names else None


GROUPS = ("actor", "algorithm", "critic", "data", "distillation", "engine", "legacy_reward_impl", "model", "model_engine")
GROUP_KEYS = ("model_engine", "engine", "optim")
"""Groups of verl's configuration that an override selects by a name."""
GROUPS += ("npu_profile", "optim", "profiler", "ref", "reward", "rollout", "transfer_queue")


def _is_verls_group(entry: object) -> bool:
    """Return whether an entry of a `defaults:` list names a group of verl, such as {actor@actor_rollout_ref.actor: X}."""
    name = next(iter(entry), "") if isinstance(entry, dict) else str(entry)
    return re.sub(r"^(override )?/?(\.\./)*", "", str(name)).partition("@")[0].partition("/")[0] in GROUPS


def _with(config: VerlConfig, overrides: list[hydra_overrides.Override]) -> VerlConfig:
    """Return the configuration with overrides, and with the engine that its keys select."""
    groups = [one for one in overrides if "@" in one.key or (one.key in GROUP_KEYS and isinstance(one.node, ConfigValue))]
    tree = hydra_overrides.apply(config.tree, [one for one in overrides if one not in groups])
    tree.children.pop("hydra", None)
    chosen = [(one.key, one.node) for one in groups]
    chosen += [(key, tree.find(key)) for key in ("model_engine", "actor_rollout_ref.actor.strategy", "engine.strategy")]
    engine = config.engine
    for key, node in chosen:
        if not isinstance(node, ConfigValue) or not isinstance(node.value, str) or "${" in node.value:
            continue
        name = re.sub(r"_(actor|ref|critic|trainer)$", "", node.value)
        if name not in ENGINES:
            message = f"got {node.value}; Hetstep does not support this engine of verl. Try dp (FSDP) or megatron"
            raise RecipeError(Problem(key, "unsupported", message, node.origin or ""))
        engine = ENGINES[name]
    tree.drop("model_engine")
    return replace(config, tree=tree, engine=engine)
