"""Find keys of a recipe that nothing reads: those of the other backend, and of other algorithms.

On the command line such a key is an error, because the user expects an effect. In the recipe's own file it is a note: a file
may have the sections of both backends or of several algorithms, so that one key selects among them. Inherited keys are not
reported, unless the file or the command line changes the algorithm: then a note names those that its section lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.algorithms import ALGORITHMS, read_by
from pipeline.config import aliases, fixed_keys, schema_validation
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, from_plain, within
from pipeline.config.data import data_paths, keyed_sets
from pipeline.config.parallelism import DTENSOR, MEGATRON, Backend, backend_of, named_backend
from pipeline.config.schema import Recipe, recipe_class
from pipeline.recipe.problems import Problem
from pipeline.seams import extras

NAMES: dict[Backend, str] = {"megatron": "Megatron-Core", "dtensor": "FSDP2"}
SECTIONS: dict[Backend, str] = {"megatron": MEGATRON, "dtensor": DTENSOR}
BOTH = ("optimizer", "scheduler")  # policy.optimizer is for both backends; policy.megatron_cfg.optimizer overrides it
ALWAYS_READ = (  # exceptions in these sections
    f"{MEGATRON}.enabled",
    f"{DTENSOR}.enabled",
)
SAME = (  # keys with the same meaning for different backends
    (f"{MEGATRON}.optimizer.lr", "policy.optimizer.kwargs.lr"),
    (f"{MEGATRON}.optimizer.weight_decay", "policy.optimizer.kwargs.weight_decay"),
    (f"{MEGATRON}.optimizer.adam_beta1", "policy.optimizer.kwargs.betas"),
    (f"{MEGATRON}.optimizer.adam_beta2", "policy.optimizer.kwargs.betas"),
    (f"{MEGATRON}.optimizer.adam_eps", "policy.optimizer.kwargs.eps"),
    (f"{MEGATRON}.optimizer.clip_grad", "policy.max_grad_norm"),
    (f"{MEGATRON}.scheduler", "policy.scheduler"),
    (f"{MEGATRON}.tensor_model_parallel_size", f"{DTENSOR}.tensor_parallel_size"),
    (f"{MEGATRON}.activation_checkpointing", f"{DTENSOR}.activation_checkpointing"),
    (f"{MEGATRON}.peft", f"{DTENSOR}.lora_cfg"),
)
FIELDS_OF_NAMED_DATA = ("subset", "split", "kwargs")
"""Fields of a data set that nothing reads if it is a file (data_path). A folder's files may be named by `split`."""
NOTED = 3  # keys that a note lists

References = Mapping[str, Collection[str]]
"""Key -> keys that its value refers to."""


@dataclass(frozen=True)
class Readers(schema_validation.Advice):
    """The choices that decide which keys of a recipe are read. None stands for a choice that is still open."""

    algorithm: str | None
    backend: Backend | None
    own: Collection[str] = ()  # those of BOTH that policy.megatron_cfg sets

    @staticmethod
    def of(recipe: Recipe) -> Readers:
        """Return the readers of a recipe."""
        own = [name for name in BOTH if getattr(recipe.policy.megatron_cfg, name) is not None]
        return Readers(recipe.algorithm, named_backend(recipe.policy), own)

    @staticmethod
    def of_tree(tree: ConfigMapping) -> Readers:
        """Return the readers of a tree. Choices that its plain values do not determine are open."""
        backend = backend_of(*(_value(tree, f"{section}.enabled") for section in SECTIONS.values()))
        own = [name for name in BOTH if isinstance(tree.find(f"{MEGATRON}.{name}"), ConfigMapping)]
        algorithm = _value(tree, "algorithm")
        return Readers(algorithm if algorithm in ALGORITHMS else None, backend, own)

    def unread(self, key: str) -> str | None:
        """Return the reason why nothing reads a key; None if something reads it or may read it."""
        if within(key, ALWAYS_READ):
            return None
        for backend, section in SECTIONS.items():
            if self.backend not in (None, backend) and within(key, (section,)):
                return f"the backend is {NAMES[self.backend]}, which does not read it"
        if self.backend == "megatron" and (own := [name for name in self.own if within(key, (f"policy.{name}",))]):
            return f"the backend is Megatron-Core, which reads {MEGATRON}.{own[0]} instead, since the recipe has that section"
        if self.algorithm and self.algorithm not in read_by(key):
            return f"the algorithm is {self.algorithm}, which does not read it"
        if self.algorithm and within(key, (self.algorithm,)) and not _may_have(key, self.algorithm):
            return f"the algorithm is {self.algorithm}, which has no such key"
        return None

    def accepts(self, key: str) -> bool:
        """Return whether a key is one of NeMo-RL's that the recipe may have without effect."""
        return fixed_keys.hint(key) is not None

    def hint(self, key: str) -> str | None:
        """Return a hint for an unknown key; None if it is no known key of another library."""
        if why := fixed_keys.hint(key):
            return why
        if key.startswith("logger.") and not extras.is_here("trackers"):
            return f"a tracker's keys need {extras.lacking('trackers')}"
        return aliases.hint(key, self.algorithm, self.rank(key), self.unread)

    def rank(self, near: str) -> Callable[[str], int]:
        """Return a function from a key to its rank as a suggestion in place of `near`, lowest first."""
        section = next((section for section in SECTIONS.values() if within(near, (section,))), None)

        def of(key: str) -> int:
            if self.unread(key):
                return 3
            if not within(key, SECTIONS.values()):
                return 1
            return 0 if section and within(key, (section,)) else 2

        return of

    def instead(self, key: str) -> str:
        """Return a hint for a key that is not read: keys to set in its place, or to leave it out."""
        alternatives = []
        for pair in (*SAME, *(pair[::-1] for pair in SAME)):
            if within(key, pair[:1]) and not self.unread(pair[1]):
                alternatives.append(pair[1])
        algorithm, _, rest = key.partition(".")
        if algorithm in ALGORITHMS and _defaults(self.algorithm).find(f"{self.algorithm}.{rest}"):
            alternatives.append(f"{self.algorithm}.{rest}")
        if own := next((section for section in SECTIONS.values() if within(key, (section,))), None):
            others = [f"{section}.enabled=false" for section in SECTIONS.values() if section != own]
            alternatives.append(" ".join([*others, f"{own}.enabled=true"]))
        return f"try {' or '.join(dict.fromkeys(alternatives))}" if alternatives else "leave it out"


def problems(recipe: Recipe, origins: Mapping[str, str], references: References) -> Iterator[Problem]:
    """Yield a problem for each key on the command line that nothing reads.

    recipe: the recipe with its chosen backend. origins: key -> the file and line that set it, or the command line.
    """
    readers = Readers.of(recipe)
    for key in _given(recipe, origins, references, lambda origin: origin == COMMAND_LINE):
        if why := readers.unread(key):
            yield Problem(key, "has-no-effect", f"{why}; {readers.instead(key)}", COMMAND_LINE)


def problems_of_files(recipe: Recipe, origins: Mapping[str, str], references: References, file: str) -> Iterator[Problem]:
    """Yield a problem for each key of a data set that is a file (data_path) but that only named data sets read.

    Keys on the command line are reported; keys in the recipe's own file only if this file also sets the data_path. file: the
    recipe's own file, in the form of `origins`.
    """

    def own(origin: str) -> bool:
        return origin.rpartition(":")[0] == file

    for section, dataset in keyed_sets(recipe.data).items():
        if dataset.data_path is None or dataset.dataset_name is not None:
            continue
        fields = [f"{section}.{name}" for name in FIELDS_OF_NAMED_DATA]
        if any(os.path.isdir(path) for path in data_paths(dataset)):
            fields.remove(f"{section}.split")
        path_is_own = own(origins.get(f"{section}.data_path", ""))
        given = _given(
            recipe, origins, references, lambda origin, both=path_is_own: origin == COMMAND_LINE or (both and own(origin))
        )
        for key in given:
            if within(key, fields):
                why = f"a file ({section}.data_path) does not use it; leave it out, or set {section}.dataset_name"
                yield Problem(key, "has-no-effect", why, origins[key])


def notes(recipe: Recipe, origins: Mapping[str, str], references: References, file: str) -> Iterator[str]:
    """Yield notes on keys for the other backend or another algorithm in the recipe's own file, `file` in `origins`.

    Also on those that it inherits for another algorithm, if it or the command line sets the algorithm.
    """
    readers = Readers.of(recipe)
    given = list(_given(recipe, origins, references, lambda origin: origin.rpartition(":")[0] == file))
    if readers.backend:
        unread = [key for key in given if within(key, SECTIONS.values()) and readers.unread(key)]
        yield from _note(file, unread, f"the backend is {NAMES[readers.backend]}")
    unread = [key for key in given if readers.algorithm not in read_by(key)]
    yield from _note(file, unread, f"the algorithm is {readers.algorithm}")
    if origins.get("algorithm", "").rpartition(":")[0] in (file, ""):  # "": the command line
        inherited = _given(recipe, origins, references, lambda origin: origin.rpartition(":")[0] not in (file, ""))
        lacking = [key for key in inherited if _lacks(recipe, key, origins)]
        why = f"the algorithm is {readers.algorithm}. They are inherited; try them in the section {readers.algorithm}"
        yield from _note(file, lacking, why)


def _lacks(recipe: Recipe, key: str, origins: Mapping[str, str]) -> bool:
    """Return whether the algorithm has a key of another one's section too, but unset and with another value."""
    section, _, rest = key.partition(".")
    counterpart, now = f"{recipe.algorithm}.{rest}", from_plain(recipe, None)
    if section not in ALGORITHMS or section == recipe.algorithm or counterpart in origins:
        return False
    return now.find(counterpart) is not None and _value(now, counterpart) != _value(now, key)


def _note(file: str, unread: list[str], why: str) -> Iterator[str]:
    if unread:
        more = f" and {len(unread) - NOTED} more" if len(unread) > NOTED else ""
        yield f"{file}: {', '.join(unread[:NOTED])}{more}: not read, because {why}"


def _given(recipe: Recipe, origins: Mapping[str, str], references: References, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the keys that differ from the default, whose origin `wanted` accepts, and to which no key that is read refers."""
    readers = Readers.of(recipe)
    referred = {name for key, names in references.items() if not readers.unread(key) for name in names}
    default, now = _defaults(recipe.algorithm), from_plain(recipe, None)
    for key, origin in origins.items():
        if wanted(origin) and not within(key, referred) and _value(default, key) != _value(now, key):
            yield key


def _may_have(key: str, algorithm: str) -> bool:
    """Return whether the schema has a key, or a section around it whose default is null or whose keys the user names."""
    around = key
    while around:
        if (node := _defaults(algorithm).find(around)) is not None:
            return around == key or not (isinstance(node, ConfigMapping) and node.children)
        around = around.rpartition(".")[0]
    return False


def _defaults(algorithm: str | None) -> ConfigMapping:
    return schema_validation.with_defaults(recipe_class(algorithm or ""), ConfigMapping())


def _value(tree: ConfigMapping, key: str) -> Any:
    """Return the text, number, truth value or null at a key; None for a list or a mapping."""
    value = getattr(tree.find(key), "value", None)
    return None if isinstance(value, list) else value
