"""Check by names, sizes and headers that a model's files are all present and complete.

`pipeline/models` reads the files and compares their tensors with config.json, as the job does. Of the weights' bytes only parts
of tied copies are read, so a file damaged without a change of length passes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from launch.preflight import architecture
from launch.recipes.model_files import is_inside, model_config, model_folder
from pipeline import config, models
from pipeline.algorithms import build
from pipeline.config import PolicyConfig, Problem, Recipe, RecipeError, collected
from pipeline.models.quantized import format_name, unpacked
from pipeline.models.weight_files import INDEX, SINGLE, TensorEntry, fault_code, file_fault, read_weight_files

OTHER_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
SHOWN = 4  # bad files reported per model
CHECKED = (*models.FAMILIES.built_in, "ministral")
"""Families whose checkpoints have transformers' names. Of others the job compares the tensors."""
PROBES, PROBE_BYTES = 64, 4096  # parts of tied copies that are compared; the job compares all bytes
Head = Literal["logprobs", "values", "rewards"]
"""The head is that of a language model, of a critic (a checkpoint may lack it), or of a reward model (a checkpoint has it)."""


def problems(recipe: Recipe, pending: Sequence[os.PathLike] = (), notes: list[str] | None = None) -> Iterator[Problem]:
    """Yield problems of incomplete files; `architecture` and `input_files` report missing folders.

    pending: models of needed runs that are still to be written, which are not checked. notes: receives files that are not read.
    """
    notes = [] if notes is None else notes
    listed: set[Path] = set()
    weighed: set[Path] = set()  # folders checked; another model of the same folder may have random_init
    models = config.models(recipe) | config.served_models(recipe)
    names = {f"{section}.model_name": policy.model_name for section, policy in models.items()}
    readers = {"policy": recipe.policy} | config.teacher_policies(recipe)
    names |= {f"{section}.tokenizer.name": policy.tokenizer.name for section, policy in readers.items()}
    if environment := config.reward_environment(recipe):
        names[f"env.{environment}.tokenizer.name"] = config.reward_model_policy(recipe).tokenizer.name
    for key, name in names.items():
        if not (folder := _folder(key, name, pending)):
            continue
        if folder not in listed:
            listed.add(folder)
            present = [folder / name for name in OTHER_FILES if os.path.lexists(folder / name)]
            yield from (
                Problem(key, fault_code(reason), f"{path} {reason}") for path in present if (reason := file_fault(path))
            )
        section = key.removesuffix(".model_name")
        loads_weights = section in models and not models[section].random_init
        if loads_weights and folder not in weighed and not (section == "policy" and _has_checkpoint(recipe)):
            weighed.add(folder)
            yield from _check_weights(
                section, models[section], folder, _head(recipe, section), notes, architecture.is_described(recipe)
            )


def _head(recipe: Recipe, section: str) -> Head:
    if section == "policy":
        of_evaluation = "rewards" if config.only_scores(recipe) else "logprobs"
        return build(recipe).needs.head if config.trains(recipe) else of_evaluation
    if section == "value":
        return "values"
    reward_models = ("evaluate.reward_model", f"env.{config.reward_environment(recipe)}")
    return "rewards" if section in reward_models else "logprobs"


def _has_checkpoint(recipe: Recipe) -> bool:
    """Return whether an evaluation takes all of the policy's weights, not only adapters, from a run's checkpoint."""
    adapters = recipe.policy.dtensor_cfg.lora_cfg.enabled or recipe.policy.megatron_cfg.peft.enabled  # of the run
    return not config.trains(recipe) and recipe.evaluate.checkpoint is not None and not adapters


def _folder(key: str, name: str | None, pending: Sequence[os.PathLike]) -> Path | None:
    """Return a model's folder; None if a run is still to write it, or if it is missing, which other checks report."""
    if not name or is_inside(name, pending):
        return None
    try:
        return model_folder(key, name)
    except RecipeError:
        return None


def _check_weights(
    section: str, policy: PolicyConfig, folder: Path, head: Head, notes: list[str], checks_tensors: bool
) -> Iterator[Problem]:
    key = f"{section}.model_name"
    if not os.path.lexists(folder / SINGLE) and not os.path.lexists(folder / INDEX):
        random = f", or {section}.random_init=true to start from random weights" if section == "policy" else ""
        if any(folder.glob("pytorch_model*.bin")):
            message = f"{folder} has weights only as pytorch_model*.bin, which are pickle files. Try safetensors files{random}"
            yield Problem(key, "unsupported", message)
        else:
            message = f"{folder} has no weights ({SINGLE} or {INDEX}). Try to fetch the whole checkpoint{random}"
            yield Problem(key, "file-not-found", message)
        return
    weight_files = read_weight_files(folder)
    notes += weight_files.notes
    file_problems = [
        Problem(key, fault_code(reason), f"{folder / name} {reason}") for name, reason in weight_files.faults.items()
    ]
    yield from file_problems[:SHOWN]
    if len(file_problems) > SHOWN:
        message = (
            f"{folder}: {len(file_problems) - SHOWN} more of its {len(weight_files.files)} weight files have faults;"
            " fetch them again"
        )
        yield Problem(key, "unreadable", message)
    if not weight_files.faults:
        model_json = None
        with collected([]):  # faults of config.json, which `architecture` reports
            model_json = model_config(policy, (), key)
        if (model_json or {}).get("auto_map"):
            notes.append(f"{key}: {folder} has Python code (auto_map in config.json), which never runs")
        if name := format_name((model_json or {}).get("quantization_config")):
            notes.append(f"{key}: {folder} is in {name}; ranks read it in bfloat16, and train and serve it unquantized")
        if os.path.lexists(folder / "adapter_config.json"):
            notes.append(f"{key}: {folder} has adapters besides the model (adapter_config.json), which are not read")
        if model_json is not None and checks_tensors:
            yield from tensor_problems(key, folder, model_json, weight_files.tensors, head)


def tensor_problems(
    key: str, folder: Path, model: Mapping[str, Any], stored: Mapping[str, TensorEntry], head: Head
) -> list[Problem]:
    """Return the differences between the stored tensors and those of the model in config.json. Imports torch and transformers.

    Leaves out models in quantizations that ranks do not read and other families; the job checks these first.
    """
    if model.get("model_type") not in CHECKED:
        return []
    if quantization := model.get("quantization_config"):
        if not format_name(quantization):
            return []
        stored = unpacked(stored)
    from pipeline.models import checkpoint_fit, hugging_face, stored_tensors  # import torch and transformers

    of_head = "logprobs" if head == "logprobs" else "values"
    body = head == "values" and checkpoint_fit.is_body(stored, head)
    try:
        of = hugging_face.config_of(model, whole=True)
        if of_head == "values":
            hugging_face.give_one_label(of, str(folder))
        found = stored_tensors.StoredTensors.of(hugging_face.meta_model(of, "logprobs" if body else of_head), stored).entries
        fit = checkpoint_fit.problems(
            key, str(folder), found, of, of_head, body, lambda *names: _look_equal(*(found[name] for name in names))
        )
        return [*fit]
    except RecipeError as error:
        return [replace(problem, key=key) for problem in error.problems]
    except Exception:  # whatever a model's code raises for sizes that do not fit, which `architecture` reports
        return []


def _look_equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether two tensors have the same size and equal bytes in evenly spaced parts."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = max(PROBE_BYTES, a.nbytes // PROBES)
    with open(a.path, "rb") as first, open(b.path, "rb") as second:
        for offset in range(0, a.nbytes, step):
            size = min(PROBE_BYTES, a.nbytes - offset)
            first.seek(a.start + offset)
            second.seek(b.start + offset)
            if first.read(size) != second.read(size):
                return False
    return True
