"""Write a checkpoint's adapters as the files that `peft.PeftModel.from_pretrained` and vLLM load."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from pipeline.boxes import whole
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.files.digests import add_manifest
from pipeline.files.storage import sync
from pipeline.files.stored_files import FileKey
from pipeline.models.hugging_face import SCORE, checkpoint_shapes, layout, meta_model, model_config
from pipeline.train.adapters.adapted_experts import ExpertParameter, parameter_of, stack_for_peft
from pipeline.train.adapters.checkpoint_adapters import SavedAdapters
from pipeline.train.adapters.spec import A, B
from pipeline.train.checkpoint_state import other_model
from pipeline.train.hf_export import new_folder
from pipeline.train.shards import read_shards
from pipeline.train.tensor_files import write_tensors
from pipeline.types import Head

ROOT = "base_model.model."  # peft's prefix of the names of the model's modules
_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_REFUSED_IN_MAMBA = (".out_proj", ".conv1d")
"""`_check_lora_target_modules_mamba` in peft/tuners/tuners_utils.py."""
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def export_adapters(
    checkpoint: Path, policy: PolicyConfig, folder: Path, head: Head = "logprobs", key: FileKey | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in float32, to `folder`.

    Any backend may have saved the checkpoint, with any layout. A value head becomes one of peft's `modules_to_save`, and
    experts become its `target_parameters`. Files are first written to a folder next to `folder`, so `folder` is always
    complete; digests.sha256 lists their SHA-256. key: decrypts an encrypted checkpoint.

    Raises RecipeError if the checkpoint has no adapters or is encrypted with another key, if the adapters are not of
    policy.model_name or peft cannot represent them, or if the base weights are random. Raises StorageError if the files cannot
    be written.
    """
    reader, records = read_shards(checkpoint, key)
    record = records[0].get("lora")
    if not record:
        raise RecipeError(Problem("adapter", "contradiction", f"got true, but {checkpoint} has no adapters. Try adapter=false"))
    if policy.random_init:
        message = "got true, but no file holds the random base weights of this run. Try adapter=false, which merges weights"
        raise RecipeError(Problem("adapter", "contradiction", message))
    saved = SavedAdapters(reader, record, meta_model(model_config(policy, head), head))
    shapes, _ = checkpoint_shapes(model_config(policy, head), head)
    adapted = saved.weights(shapes)
    if adapted != (expected := {name: shapes[name] for name in adapted if name in shapes}):
        raise other_model(checkpoint, adapted, expected)
    modules = _modules(policy, head)
    config = _config(saved, policy, modules, head)
    files = _linear(saved, modules) | _stacked(saved, config, policy, head)
    if head == "values":
        files[ROOT + SCORE] = reader.read(f"model.{SCORE}", whole(reader.shapes[f"model.{SCORE}"]))
    with new_folder(folder) as partial:
        weights = partial / "adapter_model.safetensors"
        digest = write_tensors({name: tensor.float().contiguous() for name, tensor in files.items()}, weights)
        config.save_pretrained(str(partial))
        for path in partial.iterdir():
            sync(path)
        add_manifest(partial, {weights.name: digest})


def _modules(policy: PolicyConfig, head: Head) -> dict[str, str]:
    """Return {layer on disk: transformers' name of its module} of layers whose weight is one tensor on disk and in memory."""
    pieces = layout(meta_model(model_config(policy, head), head))
    single = {name: parts[0].name for name, parts in pieces.items() if len(parts) == 1 and name.endswith(".weight")}
    return {stored.removesuffix(".weight"): name.removesuffix(".weight") for name, stored in single.items()}


def _shortest(targets: list[str], modules: Mapping[str, str]) -> list[str]:
    """Return the last parts of the targets' names if these match no other module, else the whole names."""
    ends = {target.rpartition(".")[2] for target in targets}
    matched = {name for name in modules.values() if name.rpartition(".")[2] in ends}
    return sorted(ends if matched == set(targets) else targets)


def _config(saved: SavedAdapters, policy: PolicyConfig, modules: Mapping[str, str], head: Head) -> LoraConfig:
    """Return peft's configuration of the adapters. Raises RecipeError if peft cannot represent them."""
    experts = saved.of_experts()
    linear = [layer for layer in saved.layers if not _is_of(layer, experts)]
    if unknown := sorted(layer for layer in linear if layer not in modules):
        message = (
            f"got true, but {unknown[0]} and {len(unknown) - 1} other layers have separate As. transformers joins these layers"
            " in one parameter, for which peft has one A. Try adapter=false, which merges weights"
        )
        raise RecipeError(Problem("adapter", "unsupported", message))
    if saved.spec.dora and experts:
        message = "got true, but peft has no DoRA for experts. Try adapter=false, which merges weights"
        raise RecipeError(Problem("adapter", "unsupported", message))
    # In a mixture of experts peft takes these names for those of experts, which once were layers.
    names = {modules[layer] for layer in linear}
    confused = {name for name in names if saved.mixture and name.rpartition(".")[2] in _OF_EXPERTS}
    if saved.spec.dora and confused:
        message = f"got true, but peft treats {min(confused)} as experts, which have no DoRA. Try adapter=false"
        raise RecipeError(Problem("adapter", "unsupported", message))
    if model_config(policy, head).model_type in _MAMBA and (refused := {n for n in names if n.endswith(_REFUSED_IN_MAMBA)}):
        message = f"got true, but peft takes no adapter of {min(refused)} in a model with Mamba layers. Try adapter=false"
        raise RecipeError(Problem("adapter", "unsupported", f"{message}, which merges weights"))
    parameters = [*experts, *(f"{name}.weight" for name in confused)]
    return LoraConfig(
        task_type="CAUSAL_LM" if head == "logprobs" else "SEQ_CLS",
        base_model_name_or_path=policy.model_name,
        r=saved.spec.dim,
        lora_alpha=saved.spec.alpha,  # pyright: ignore[reportArgumentType] - peft computes with it
        target_modules=_shortest(sorted(names - confused), modules),
        target_parameters=sorted(parameters) or None,
        modules_to_save=["score"] if head == "values" else None,
        use_dora=saved.spec.dora,
        use_rslora=saved.spec.rslora,
        inference_mode=True,
    )


def _is_of(layer: str, experts: Mapping[str, ExpertParameter]) -> bool:
    parameter = parameter_of(layer)
    return parameter is not None and parameter[0] in experts


def _linear(saved: SavedAdapters, modules: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return {peft's name: tensor} of the adapters of linear layers."""
    return {
        ROOT + modules[layer] + name.removeprefix(layer): saved.read(name)
        for layer, shape in saved.layers.items()
        if layer in modules
        for name in saved.spec.shapes(layer, *shape)
    }


def _stacked(saved: SavedAdapters, config: LoraConfig, policy: PolicyConfig, head: Head) -> dict[str, torch.Tensor]:
    """Return {peft's name: tensor} of the adapters of experts. peft nests its modules, so the names come from a peft model."""
    experts = saved.of_experts()
    if not experts:
        return {}
    with torch.device("meta"):
        peft = get_peft_model(meta_model(model_config(policy, head), head), copy.copy(config))
    state = {}
    for name, module in peft.named_modules():
        if not isinstance(module, ParamWrapper):
            continue
        path = name.removeprefix(ROOT).replace(".base_layer", "")
        parameter = experts.get(f"{path}.{module.parameter_name}")
        if parameter is None:
            continue  # a linear layer
        a, b = [], []
        for layer in map(parameter.layer, range(parameter.experts)):
            shapes = saved.spec.shapes(layer, parameter.rows, parameter.columns)
            tensors = [saved.read(stored) if layer in saved.layers else torch.zeros(shape) for stored, shape in shapes.items()]
            a.append(tensors[0])
            b.append(tensors[1])
        stacked = stack_for_peft(a, b)
        state |= {name + suffix: tensor for suffix, tensor in zip((A, B), stacked, strict=True)}
    assert len(state) == 2 * len(experts), "peft's model has no adapters of some experts"
    return state
