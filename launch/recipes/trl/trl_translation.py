"""Translate a configuration of TRL, part by part."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.recipes.translation.rules import Ignored, apply, fits
from launch.recipes.translation.translator import Translation, Translator
from launch.recipes.trl import (
    offline_trainers,
    sampling_trainers,
    trl_data,
    trl_defaults,
    trl_lengths,
    trl_models,
    trl_optimizers,
)
from launch.recipes.trl.trl_defaults import ALGORITHMS, EARLIER, RENAMED, TRAINERS, WITHOUT_EFFECT


@dataclass(frozen=True)
class Processes:
    """The processes of a configuration, one for each GPU that trains."""

    number: int
    machines: int
    source: str  # what says so; empty if nothing does
    is_ours: bool = False  # whether our keys on the command line say so


def translate(
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    trainer: str,
    processes: Processes,
    ours: Mapping[str, Any],
) -> Translation:
    """Translate a configuration with TRL's defaults.

    values: the fields. origins: field -> "file:line", for fields that are no defaults. trainer: a name of TRAINERS.
    ours: our keys on the command line.
    """
    t = Translator(values, origins)
    algorithm = ALGORITHMS[trainer]
    t.put("algorithm", algorithm, "model_name_or_path")
    _processes(t, processes)
    length = trl_lengths.translate(t, trainer, algorithm, processes.number)
    trl_optimizers.translate(t, length)
    trl_models.translate(t)
    trl_data.translate(t, trainer, algorithm, ours)
    if algorithm == "grpo":
        sampling_trainers.translate(t, trainer, length, ours)
    else:
        offline_trainers.translate(t, trainer)
    apply(t, (Ignored(WITHOUT_EFFECT[trainer]),) if WITHOUT_EFFECT[trainer] else ())
    t.consume("output_dir")
    t.refuse_unknown("TRL", _names())
    return t.result()


def _processes(t: Translator, processes: Processes) -> None:
    if processes.is_ours:
        return
    per_machine = -(-processes.number // processes.machines)
    t.put("cluster.train.nodes", processes.machines, "per_device_train_batch_size")
    t.put("cluster.train.gpus_per_node", per_machine, "per_device_train_batch_size")
    if not processes.source:
        text = "1 process is assumed, since nothing names a number; --num_processes N or cluster.train.gpus_per_node=N sets one"
        t.change("num_processes", text)


def knows(field: str, trainer: str) -> bool:
    """Return whether a field is one that the tables of a trainer have."""
    tables = (trl_lengths.RULES, trl_optimizers.RULES, trl_models.RULES, trl_data.RULES)
    tables += (sampling_trainers.RULES,) if ALGORITHMS[trainer] == "grpo" else (offline_trainers.RULES[trainer],)
    patterns = [pattern for table in tables for rule in table for pattern in rule.patterns]
    names = (*trl_defaults.of(trainer), *WITHOUT_EFFECT[trainer].split())
    return field in names or any(fits(pattern, field) for pattern in patterns)


@functools.cache
def _names() -> frozenset[str]:
    """Return the fields of all trainers."""
    return frozenset(name for trainer in TRAINERS for name in (*trl_defaults.of(trainer), *WITHOUT_EFFECT[trainer].split())) | {
        *RENAMED,
        *EARLIER,
    }
