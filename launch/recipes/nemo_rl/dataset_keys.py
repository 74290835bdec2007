"""Translate one data set of `data.train` or `data.validation`, and find the files that a recipe names.

Built-in data sets keep their names (`pipeline/config/data.py`). Paths are relative to the root of the NeMo-RL repository that
contains the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.recipes.translation.translator import Translator
from pipeline.config import NAMED_DATASETS
from pipeline.data.file_formats import suffix_format

SPLIT = {"OpenMathInstruct-2": 0.05, "tulu3_sft_mixture": 0.05, "Nemotron-Cascade-2-SFT-Math": 0.05, "OpenR1-Math-220k": 0.0}
"""Built-in data set that holds out a validation split -> default share of that split. Others ignore split_validation_size."""

ONE_SPLIT = ("DAPOMath17K", "DAPOMathAIME2024", "DeepScaler", "AIME2024", "AIME2025", "AIME2026", "Tulu3Preference")
"""Built-in data sets that also ignore `split`."""

# NeMo-RL's classes that read a file, or a data set of any name: NeMo-RL's key -> (our key, NeMo-RL's default).
READERS: dict[str, dict[str, tuple[str, str]]] = {
    "ResponseDataset": {"input_key": ("input_key", "input"), "output_key": ("output_key", "output")},
    "openai_format": {"chat_key": ("messages_key", "messages")},
    "BinaryPreferenceDataset": {
        "prompt_key": ("input_key", "prompt"),
        "chosen_key": ("chosen_key", "chosen"),
        "rejected_key": ("rejected_key", "rejected"),
    },
}
PROCESSORS = {"sft": "sft_processor", **dict.fromkeys(("grpo", "ppo", "distillation"), "math_hf_data_processor")}
"""Algorithm -> NeMo-RL's processor of records that corresponds to Hetstep's."""


def find(name: str, recipe: Path) -> Path | None:
    """Return the absolute path of a file; None if it does not exist.

    Search below the recipe's parent folders, the nearest first, and then below the working directory.
    """
    folders = (*Path(os.path.abspath(recipe)).parents, Path.cwd())
    return next((path for path in (folder / name for folder in folders) if path.is_file()), None)


def report_missing(t: Translator, key: str, name: str, recipe: Path) -> None:
    """Add a problem for a file that the recipe names and that does not exist."""
    message = f"found no {name} below a parent folder of {recipe} or in the working directory"
    t.problem(key, "file-not-found", f"{message}. Try an absolute path")


@dataclass
class Dataset:
    """A data set of a NeMo-RL recipe, and its fields that are not translated yet."""

    t: Translator
    algorithm: str
    key: str  # NeMo-RL's key; `data.train[1]` in a list
    ours: str  # our key
    own_fields: Mapping[str, Any]  # the data set's own fields
    default: Mapping[str, Any]  # the fields of data.default
    path: Path  # path of the recipe
    fields: dict[str, Any] = field(init=False)  # fields that are not translated yet

    def __post_init__(self) -> None:
        self.fields = {**self.default, **self.own_fields}

    def translate(self) -> bool:
        """Translate the data set, and return whether it holds out a validation split."""
        name = self._consume("dataset_name")
        if name not in NAMED_DATASETS and name not in READERS:
            names = ", ".join((*NAMED_DATASETS, *READERS))
            self.t.lacks(self.key, name, "this data set", f"{self.key}.dataset_name, one of: {names}")
            self.t.consume(self.key)
            return False
        self._translate_source(name)
        for file in ("prompt_file", "system_prompt_file"):
            if (file_name := self._consume(file)) is not None:
                if (path := find(file_name, self.path)) is None:
                    report_missing(self.t, self._source(file), file_name, self.path)
                else:
                    self._put(file, str(path), file)
        processor, expected = self._consume("processor"), PROCESSORS.get(self.algorithm)
        if processor not in (None, expected):
            remedy = f"{expected}, which {self.algorithm} has" if expected else "without it"
            self.t.lacks(self._source("processor"), processor, "this data processor", remedy)
        held_out = self._held_out(name)
        for same_name in ("subset", "max_samples", "repeat", "env_name"):
            self._put(same_name, self._consume(same_name), same_name)
        for unknown in self.fields:
            if not self.t.has(f"{self.key}.{unknown}"):  # the field is from data.default, or in a list
                self.t.problem(self._source(unknown), "unknown-key", "is not a known key of a data set. Try without it")
        return held_out

    def _source(self, name: str) -> str:
        """Return the key of NeMo-RL's recipe that sets a field of the data set."""
        return f"{self.key if name in self.own_fields or name not in self.default else 'data.default'}.{name}"

    def _consume(self, name: str) -> Any:
        if self.t.has(key := f"{self.key}.{name}"):
            self.t.consume(key)
        return self.fields.pop(name, None)

    def _put(self, ours: str, value: Any, theirs: str) -> None:
        if value is not None:
            self.t.put(f"{self.ours}.{ours}", value, self._source(theirs))

    def _translate_source(self, name: str) -> None:
        split = self._consume("split")
        if name in NAMED_DATASETS:
            self._put("dataset_name", name, "dataset_name")
            self._put("split", None if name in ONE_SPLIT else split, "split")
            if NAMED_DATASETS[name].output_key and (answer := self._consume("output_key")) != "expected_answer":
                self._put("output_key", answer, "output_key")  # leave out the data set's default
            return
        self._put("split", split, "split")
        path = self._consume("data_path")
        if path is None:
            message = "is not given; expected a data file, or a data set's name on the Hugging Face Hub"
            self.t.problem(f"{self.key}.data_path", "missing-value", message)
        file = find(str(path), self.path) if path else None
        is_file = file or suffix_format(str(path)) is not None
        self._put("data_path" if is_file else "dataset_name", str(file) if file else path, "data_path")
        for theirs, (ours, usual) in READERS[name].items():
            self._put(ours, self._consume(theirs) or usual, theirs)

    def _held_out(self, name: str) -> bool:
        key, size, seed = "split_validation_size", self._consume("split_validation_size"), self._consume("seed")
        splits = name in SPLIT or name == "ResponseDataset"
        if splits or self.fields.get("max_samples") is not None:
            self._put("seed", seed, "seed")
        if not splits:
            if size:
                self.t.ignore(self._source(key), f"{name} holds out no validation split, in NeMo-RL either")
            return False
        size = SPLIT.get(name, 0.0) if size is None else size
        if not self.key.startswith("data.train"):
            if size:
                message = "all records are validated; NeMo-RL validates only those that are not held out"
                self.t.change(self._source(key), message)
            return False
        self._put(key, size, key)
        return bool(size)
