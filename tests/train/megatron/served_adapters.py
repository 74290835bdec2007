"""Check what a refit of adapters alone reads of Megatron-Core: the tensors that an export of a checkpoint gives peft."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.config import MegatronLoRAConfig
from pipeline.train.adapters.peft_files import ROOT, export_adapters
from pipeline.train.adapters.served_adapters import served_adapters
from pipeline.train.megatron.megatron_backend import MegatronBackend
from pipeline.train.train_backend import ModelRole
from tests.train import cases, ranks
from tests.train.megatron import adapters, layouts
from tests.train.megatron.layouts import Layout

ATTENTION = ["linear_qkv", "linear_proj"]
LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj"]
SHARED_EXPERTS = ["*.shared_experts.linear_fc1", "*.shared_experts.linear_fc2"]
KINDS = {  # of a family's served adapters
    "qwen2": (adapters.LORA, dataclasses.replace(adapters.LORA, target_modules=["linear_q", "linear_v", "linear_fc1_up"])),
    "llama": (dataclasses.replace(adapters.LORA, exclude_modules=["*.0.*linear_fc2"], use_rslora=True),),
    "qwen3_moe": (dataclasses.replace(adapters.LORA, target_modules=ATTENTION),),
    "deepseek_v3": (dataclasses.replace(adapters.LORA, target_modules=[*LATENT, *SHARED_EXPERTS]),),
}


def check_families(families: tuple[str, ...], layout: Layout, folder: Path) -> None:
    for family in families:
        for i, config in enumerate(KINDS[family]):
            check_equals_the_export(folder / family, layout, config, folder / "served" / f"{family}-{i}-{layout.name}")
            layouts.release()


def check_equals_the_export(model: Path, layout: Layout, config: MegatronLoRAConfig, place: Path) -> None:
    """Compare bit for bit, before and after a step, by rank and gathered. place: an empty folder."""
    trained = adapters.backend(model, layout, config, ModelRole(serves_adapters=True))
    expected = served_adapters(trained._policy)
    assert list(expected.shapes.items()) == list(trained.shapes.items())
    assert (expected.dim, expected.alpha, expected.rslora) == (config.dim, config.alpha, config.use_rslora)
    adapters.shake(trained)
    before = exported(trained, place / "before")
    check_served(trained, before)
    trained.step(ranks.batches(trained, layout), cases.loss)
    after = exported(trained, place / "after")
    check_served(trained, after)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    merged, base = dict(trained.weights(model=True)), load_file(model / "model.safetensors")
    if dist.get_rank() == 0:
        changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
        assert changed == {f"{name.split('.lora_')[0]}.weight" for name in after}
    check_served(trained, after)


def exported(trained: MegatronBackend, place: Path) -> dict[str, torch.Tensor]:
    """Return the adapters as an export of a checkpoint writes them, without peft's prefix. Collective."""
    trained.shards().write(place / "checkpoint", dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 0:
        export_adapters(place / "checkpoint", trained._policy, place / "adapter")
    dist.barrier()
    files = load_file(place / "adapter" / "adapter_model.safetensors")
    return {name.removeprefix(ROOT): tensor for name, tensor in files.items()}


def check_served(trained: MegatronBackend, adapters: dict[str, torch.Tensor]) -> None:
    cases.check_all_held(cases.check_layout(trained, adapters))
    gathered = ranks.weights(trained)
    assert list(gathered) == list(trained.shapes)
    assert dist.get_rank() != 0 or all(torch.equal(tensor, adapters[name]) for name, tensor in gathered.items())


def check_offloaded(model: Path, layout: Layout) -> None:
    """Check that what a refit reads stays where it is, and alone, while the rest is in host memory."""
    trained = adapters.backend(model, layout, adapters.LORA, ModelRole(serves_adapters=True))
    trained.step(ranks.batches(trained, layout), cases.loss)
    read = {name: trained.local_tensor(name).clone() for name in {region.tensor for region in trained.layout()}}
    trained.offload(keep_weights=True)
    assert all(torch.equal(trained.local_tensor(name), tensor) for name, tensor in read.items())
    left = {name for name, local in trained._local.items() if local.tensor.untyped_storage().nbytes()}
    assert left == read.keys() == trained._local.keys() - trained._base.keys()
    trained.reload()
    trained.step(ranks.batches(trained, layout), cases.loss)
