"""Write a checkpoint's adapters as the files that `peft.PeftModel.from_pretrained` and vLLM load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pipeline.boxes import whole
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.models.hugging_face import SCORE, checkpoint_shapes, layout, meta_model, model_config
from pipeline.storage import StorageError, sync
from pipeline.train import lora
from pipeline.train.adapters.spec import A, AdapterSpec, layer_of
from pipeline.train.shards import read_shards, write_tensors
from pipeline.types import Head

ROOT = "base_model.model."  # peft's prefix of the names of the model's modules


def export_adapters(checkpoint: Path, policy: PolicyConfig, folder: Path, head: Head = "logprobs") -> None:
    """Write adapter_config.json and adapter_model.safetensors, in float32, to `folder`.

    Any backend may have saved the checkpoint, with any layout. A value head is one of peft's `modules_to_save`. Files are first
    written next to the folder, so it is always complete. Raises RecipeError if the checkpoint has no adapters, or they are not
    of policy.model_name, or the base is random; StorageError if the files cannot be written.
    """
    reader, records = read_shards(checkpoint)
    tensors = {
        name.removeprefix(lora.PREFIX): reader.read(name, whole(shape))
        for name, shape in reader.shapes.items()
        if name.startswith(lora.PREFIX)
    }
    if not tensors:
        raise RecipeError(Problem("adapter", "contradiction", f"got true, but {checkpoint} has no adapters. Try without it"))
    if policy.random_init:
        message = "got true for a run whose base has random weights, which no file holds. Try without it: merged weights"
        raise RecipeError(Problem("adapter", "contradiction", message))
    modules = _modules(policy, head)
    shapes, _ = checkpoint_shapes(model_config(policy, head), head)
    adapted = lora.adapted_weights(reader)
    if wrong := sorted(name for name, shape in adapted.items() if shapes.get(name) != shape):
        message = f"{checkpoint} is of another model; these tensors differ: {wrong[:4]} ({len(wrong)})"
        raise RecipeError(Problem("policy.model_name", "contradiction", message))
    files = {ROOT + modules[layer] + name.removeprefix(layer): t for name, t in tensors.items() if (layer := layer_of(name))}
    if head == "values":
        files[ROOT + SCORE] = reader.read(f"model.{SCORE}", whole(reader.shapes[f"model.{SCORE}"]))
    targets = [modules[name.removesuffix(A)] for name in tensors if name.endswith(A)]
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # an earlier attempt was killed
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        write_tensors(
            {name: tensor.float().contiguous() for name, tensor in files.items()}, partial / "adapter_model.safetensors"
        )
        _write_config(lora.saved_spec(records[0]["lora"]), policy, partial, _shortest(targets, modules), head)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"writing the adapters to {folder} failed: {error}") from error
    partial.rename(folder)
    sync(folder.parent)


def _modules(policy: PolicyConfig, head: Head) -> dict[str, str]:
    """Return {layer on disk: transformers' name of the module} of the weights that are one tensor on disk and in memory."""
    pieces = layout(meta_model(model_config(policy, head), head))
    single = {name: held[0].name for name, held in pieces.items() if len(held) == 1 and name.endswith(".weight")}
    return {stored.removesuffix(".weight"): name.removesuffix(".weight") for name, stored in single.items()}


def _shortest(targets: list[str], modules: Mapping[str, str]) -> list[str]:
    """Return the last parts of the targets' names where they match no other module, else the whole names."""
    ends = {target.rpartition(".")[2] for target in targets}
    matched = {name for name in modules.values() if name.rpartition(".")[2] in ends}
    return sorted(ends if matched == set(targets) else targets)


def _write_config(spec: AdapterSpec, policy: PolicyConfig, folder: Path, targets: list[str], head: Head) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        task_type="CAUSAL_LM" if head == "logprobs" else "SEQ_CLS",
        base_model_name_or_path=policy.model_name,
        r=spec.dim,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType] - peft computes with it
        target_modules=targets,
        modules_to_save=["score"] if head == "values" else None,
        use_dora=spec.dora,
        use_rslora=spec.rslora,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    for path in folder.iterdir():
        sync(path)
