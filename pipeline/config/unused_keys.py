"""Find keys of a recipe that nothing reads: of the backend that does not train, and of algorithms that do not run.

On the command line such a key is an error, because somebody expects it to do something. In the recipe's own file it is a note:
a file may hold the sections of both backends, so that one key changes the backend. Inherited keys are not mentioned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from pipeline.algorithms import ALGORITHMS, read_by
from pipeline.config import aliases, schema_validation
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, ConfigNode, from_plain
from pipeline.config.parallelism import DTENSOR, MEGATRON, Backend, backend_of, named_backend
from pipeline.config.schema import Recipe
from pipeline.problems import Problem

NAMES: dict[Backend, str] = {"megatron": "Megatron-Core", "dtensor": "FSDP2"}
SECTIONS: dict[Backend, str] = {"megatron": MEGATRON, "dtensor": DTENSOR}
BOTH = ("optimizer", "scheduler")  # policy.optimizer is for both backends; policy.megatron_cfg.optimizer goes before it
ALWAYS_READ = (  # exceptions to the sections above
    f"{MEGATRON}.enabled",
    f"{DTENSOR}.enabled",
    f"{MEGATRON}.checkpoint.async_save",  # the default of checkpointing.async_save
)
SAME = (  # keys that say the same to different readers
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
NOTED = 3  # keys that a note names

References = Mapping[str, Collection[str]]
"""By key the keys that its value is made of."""


@dataclass(frozen=True)
class Readers:
    """The choices that decide which keys of a recipe are read; None where one is not made yet."""

    algorithm: str | None
    backend: Backend | None
    own: Collection[str] = ()  # those of BOTH that policy.megatron_cfg has for itself

    @staticmethod
    def of(recipe: Recipe) -> Readers:
        own = [name for name in BOTH if getattr(recipe.policy.megatron_cfg, name) is not None]
        return Readers(recipe.algorithm, named_backend(recipe.policy), own)

    @staticmethod
    def of_tree(tree: ConfigMapping) -> Readers:
        """Return the readers as far as the plain values of a tree tell."""
        backend = backend_of(*(_value(tree, f"{section}.enabled") for section in SECTIONS.values()))
        own = [name for name in BOTH if isinstance(tree.find(f"{MEGATRON}.{name}"), ConfigMapping)]
        algorithm = _value(tree, "algorithm")
        return Readers(algorithm if algorithm in ALGORITHMS else None, backend, own)

    def unread(self, key: str) -> str | None:
        """Return why nothing reads a key; None if something does, or may."""
        if _within(key, ALWAYS_READ):
            return None
        for backend, section in SECTIONS.items():
            if self.backend not in (None, backend) and _within(key, (section,)):
                return f"{NAMES[self.backend]} trains, which does not read it"
        if self.backend == "megatron" and (own := [name for name in self.own if _within(key, (f"policy.{name}",))]):
            return f"Megatron-Core trains, which reads {MEGATRON}.{own[0]} instead, as the recipe has that"
        if self.algorithm and self.algorithm not in read_by(key):
            return f"the algorithm is {self.algorithm}, which does not read it"
        return None

    def hint(self, key: str) -> str | None:
        """Return what to do instead of giving a key that the schema does not have; None if no other library has it."""
        return aliases.hint(key, self.algorithm, self.rank(key))

    def rank(self, near: str) -> Callable[[str], int]:
        """Return a function from a key to its place in the order of suggestions instead of `near`, lowest first."""
        section = next((section for section in SECTIONS.values() if _within(near, (section,))), None)

        def of(key: str) -> int:
            if self.unread(key):
                return 3
            if not _within(key, SECTIONS.values()):
                return 1
            return 0 if section and _within(key, (section,)) else 2

        return of

    def instead(self, key: str) -> str:
        """Return what to give in place of a key that is not read."""
        ways = []
        for pair in (*SAME, *(pair[::-1] for pair in SAME)):
            if _within(key, pair[:1]) and not self.unread(pair[1]):
                ways.append(pair[1])
        section, _, rest = key.partition(".")
        if section in ALGORITHMS and f"{self.algorithm}.{rest}" in schema_validation.keys(Recipe):
            ways.append(f"{self.algorithm}.{rest}")
        if backend := next((name for name, section in SECTIONS.items() if _within(key, (section,))), None):
            others = [f"{section}.enabled=false" for name, section in SECTIONS.items() if name != backend]
            ways.append(" ".join([*others, f"{SECTIONS[backend]}.enabled=true"]))
        return f"try {' or '.join(dict.fromkeys(ways))}" if ways else "leave it out"


def problems(recipe: Recipe, origins: Mapping[str, str], references: References) -> Iterator[Problem]:
    """Yield a problem for each key that the command line gives and nothing reads.

    recipe: with the backend that was chosen. origins: where each key was given.
    """
    readers = Readers.of(recipe)
    for key in _given(recipe, origins, references, lambda origin: origin == COMMAND_LINE):
        if why := readers.unread(key):
            yield Problem(key, "has-no-effect", f"{why}; {readers.instead(key)}", COMMAND_LINE)


def notes(recipe: Recipe, origins: Mapping[str, str], references: References, file: str) -> Iterator[str]:
    """Yield a note on keys of the recipe's own file for the backend that does not train. file: its name as origins have it."""
    readers = Readers.of(recipe)
    given = _given(recipe, origins, references, lambda origin: origin.rpartition(":")[0] == file)
    unread = [key for key in given if _within(key, SECTIONS.values()) and readers.unread(key)]
    if unread:
        more = f" and {len(unread) - NOTED} more" if len(unread) > NOTED else ""
        yield f"{file}: {', '.join(unread[:NOTED])}{more}: not read, because {NAMES[readers.backend]} trains"


def _given(recipe: Recipe, origins: Mapping[str, str], references: References, wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield keys of the wanted origins that differ from the default and that no key which is read refers to."""
    readers = Readers.of(recipe)
    referred = {name for key, names in references.items() if not readers.unread(key) for name in names}
    default, now = schema_validation.with_defaults(Recipe, ConfigMapping()), from_plain(dataclasses.asdict(recipe), None)
    for key, origin in origins.items():
        if wanted(origin) and not _within(key, referred) and _value(default, key) != _value(now, key):
            yield key


def _value(tree: ConfigNode, key: str) -> object:
    return getattr(tree.find(key), "value", None)


def _within(key: str, sections: Collection[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
