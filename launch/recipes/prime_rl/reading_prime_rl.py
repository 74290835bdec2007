"""Read a configuration of prime-rl: TOML files, or a script that starts an entry point, with the command line's options."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.recipes.foreign import ForeignSource
from launch.recipes.prime_rl import prime_rl_defaults, prime_rl_translation
from launch.recipes.translation import foreign_tree, leaf_types, long_options, shell_script
from pipeline.config import Problem, RecipeError, config_tree
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, ConfigNode, ConfigValue
from pipeline.config.loading import Layers
from pipeline.recipe import user_files

SECTIONS = ("trainer", "orchestrator", "inference")
"""Sections of `rl` that may be files of their own."""


@dataclass(frozen=True)
class PrimeRLConfig:
    """A configuration before prime-rl's defaults."""

    tree: ConfigMapping = field(default_factory=ConfigMapping)
    kind: str | None = None  # rl or sft; None: the keys tell
    environment: Mapping[str, str] = field(default_factory=dict)  # as of `shell_script.Command`


def read(source: ForeignSource) -> Layers:
    """Translate a configuration of prime-rl into our keys."""
    ours: list[tuple[str, ConfigNode]] = []
    words: list[str] = []
    variables: dict[str, str] = {}
    for word in source.arguments:
        key, equals, value = word.partition("=")
        if equals and key.isidentifier() and source.path.suffix == ".sh" and shell_script.mentions(source.text, key):
            variables[key] = value
            continue
        is_ours = equals and not word.startswith("-") and foreign_tree.is_our_key(key)
        ours += config_tree.parse_overrides([word]) if is_ours else []
        words += [] if is_ours else [word]
    config = (
        PrimeRLConfig(_wrapped(_toml(source.path), words)) if source.path.suffix == ".toml" else _of_script(source, variables)
    )
    config = _with_words(config, [(word, COMMAND_LINE) for word in words], source.path)
    tree = config.tree
    kind = config.kind or ("rl" if "trainer" in tree.children or "orchestrator" in tree.children else "sft")
    problems = list(_share(tree)) if kind == "rl" else []
    defaults = prime_rl_defaults.of_rl() if kind == "rl" else prime_rl_defaults.of_sft()
    below = ConfigMapping()
    for key, value in defaults.items():
        below.set(key, ConfigValue(value))
    merged = config_tree.merge(below, tree)
    problems += leaf_types.replace_wrong(merged, prime_rl_defaults.examples(kind), prime_rl_defaults.NULLABLE)
    resolved = foreign_tree.resolve(merged)
    resolved = replace(resolved, environment={**config.environment, **resolved.environment})
    own = {key: origin for key, origin in resolved.origins.items() if origin}
    t = prime_rl_translation.translate(resolved.values, own, kind, {key for key, _ in ours})
    wrong = {problem.key for problem in problems}
    t = replace(t, problems=[problem for problem in t.problems if problem.key not in wrong])
    return foreign_tree.as_layers(resolved, t, source.path, ours, problems, default_origin="prime-rl's default")


# ---- files -----------------------------------------------------------------------------------------------------------------


def _toml(path: Path) -> ConfigMapping:
    """Return a TOML file as a tree whose values have their lines. Raises RecipeError for a file that cannot be read."""
    shown = config_tree.short_path(path)
    try:
        text = user_files.read_text(path, config_tree.MAX_YAML)
        values = tomllib.loads(text)
    except OSError as error:
        raise RecipeError(Problem("recipe", "unreadable", f"{error.strerror}", shown)) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(Problem("recipe", "bad-format", f"is not TOML: {error}", shown)) from None
    plain: dict[str, Any] = _plain(values)
    return config_tree.from_plain(plain, shown, _lines(text, shown))


def _plain(value: Any) -> Any:
    """Return a value of TOML, in which "None" is null."""
    if isinstance(value, dict):
        return {key.replace("-", "_"): _plain(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    return None if value == "None" else value


def _lines(text: str, shown: str) -> dict[str, str]:
    """Return dotted key -> "file:line" of the keys of a TOML file, but for those in lists of tables."""
    found: dict[str, str] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([\w.-]+)\]", line):
            section = match[1] + "."
            found.setdefault(match[1].replace("-", "_"), f"{shown}:{number}")
        elif match := re.match(r"\s*\[\[([\w.-]+)\]\]", line):
            section = ""
            found.setdefault(match[1], f"{shown}:{number}")
        elif match := re.match(r"\s*([\w.-]+)\s*=", line):
            found.setdefault((section + match[1]).replace("-", "_"), f"{shown}:{number}")
    return found


def _wrapped(tree: ConfigMapping, words: Sequence[str]) -> ConfigMapping:
    """Return the tree below its section, if it is the file of one: an orchestrator's, or what the command line leaves out."""
    given = [word[2:] for word in words if word.removeprefix("--") in SECTIONS]
    if "train" in tree.children and not any(name in tree.children for name in SECTIONS):
        return ConfigMapping({"orchestrator": tree})
    if given and not any(name in tree.children for name in SECTIONS):
        return ConfigMapping({"orchestrator" if "trainer" in given else "trainer": tree})
    return tree


# ---- options ---------------------------------------------------------------------------------------------------------------


def _with_words(config: PrimeRLConfig, words: Sequence[tuple[str, str]], path: Path) -> PrimeRLConfig:
    """Return the configuration with prime-rl's options: `@ FILE`, `--section @ FILE`, `--a.b VALUES`, `--no-a.b`."""
    tree = config.tree
    for option, origin, values in _options(words):
        key = option.removeprefix("--").replace("-", "_")
        layer = ConfigMapping()
        if values[:1] == ["@"]:
            below = _toml(_beside(path, "".join(values[1:2])))
            layer = ConfigMapping({key: below}) if key else below
        elif not re.fullmatch(r"--[a-z][\w.-]*", option):
            message = f"got '{option}'; expected an option of prime-rl, such as --trainer.optim.lr 1e-6, or key=value"
            raise RecipeError(Problem(option[:80], "bad-format", message, origin))
        elif not values and key.startswith("no_"):
            layer.set(key[3:], ConfigValue(None, origin))
        else:
            read = [None if text == "None" else long_options.value(text) for text in values] or [True]
            layer.set(key, config_tree.from_plain(read if len(read) > 1 else read[0], origin))
        tree = config_tree.merge(tree, layer)
    return replace(config, tree=tree)


def _options(words: Sequence[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """Return (option, origin, values) of each option. A file's values are `@` and its name, and its option may be empty."""
    found: list[tuple[str, str, list[str]]] = []
    for word, origin in words:
        values = found[-1][2] if found else []
        is_complete = values[:1] == ["@"] and len(values) > 1
        if word.startswith("@"):
            if values or not found:
                found.append(("", origin, []))
            found[-1][2].extend(["@", word[1:]] if word[1:] else ["@"])
        elif re.match(r"--[A-Za-z]", word) or not found or is_complete:
            option, equals, text = word.partition("=")
            found.append((option, origin, [text] if equals else []))
        else:
            values.append(word)
    return found


def _beside(path: Path, name: str) -> Path:
    found = next((folder / name for folder in (Path(), *path.absolute().parents) if (folder / name).is_file()), None)
    if found is None:
        message = f"got @ {name}; expected a file below the working directory, or below a folder that holds the recipe"
        raise RecipeError(Problem("recipe", "file-not-found", message, config_tree.short_path(path)))
    return found


def _entry(words: Sequence[str]) -> int | None:
    """Return the index of the entry point, rl or sft, in a command; None for another command."""
    for number, word in enumerate(words):
        if word in ("rl", "sft") and (number == 0 or "run" in words[:number]):
            return number
    return None


def _of_script(source: ForeignSource, variables: Mapping[str, str]) -> PrimeRLConfig:
    command = shell_script.find_command(source.text, source.path, lambda words: _entry(words) is not None, variables)
    if command is None:
        message = "has no command that starts prime-rl; expected one such as `uv run rl @ FILE.toml`"
        raise RecipeError(Problem("recipe", "bad-format", message, config_tree.short_path(source.path)))
    first = _entry(command.words)
    assert first is not None
    words = command.words[first + 1 :]
    problems = [problem for word in words if (problem := command.problem(str(word), word))]
    if problems:
        raise RecipeError(*problems)
    config = PrimeRLConfig(kind=str(command.words[first]), environment=command.environment)
    return _with_words(config, [(str(word), command.origin(word)) for word in words], source.path)


# ---- shared keys -----------------------------------------------------------------------------------------------------------


def _share(tree: ConfigMapping) -> list[Problem]:
    """Give the keys of sections the values of the keys that they share, in place. Return the contradictions."""
    problems = []
    for key, targets in prime_rl_defaults.SHARED.items():
        node = tree.find(key)
        if node is None:
            continue
        for target in targets:
            given = tree.find(target)
            if given is None:
                tree.set(target, node)
            elif _value(given) != _value(node) and key not in prime_rl_defaults.MAY_DIFFER:
                message = f"got {_value(given)} with {key}={_value(node)}; expected one of the two, as prime-rl does"
                problems.append(Problem(target, "contradiction", message, given.origin or ""))
    for name in ("ckpt", "monitors.wandb"):
        if isinstance(tree.find(name), ConfigMapping) and tree.find(f"trainer.{name}") is None:
            tree.set(f"trainer.{name}", ConfigMapping(origin=tree.find(name).origin))  # type: ignore[union-attr]
    return problems


def _value(node: ConfigNode) -> Any:
    return node.value if isinstance(node, ConfigValue) else node.plain()
