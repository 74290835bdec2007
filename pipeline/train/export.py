"""A Hugging Face checkpoint out of any train backend: sharded safetensors, the index, config and tokenizer.

Tensors stream through rank 0 one at a time; its memory is bounded by one shard file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from pipeline.checkpoint import sync
from pipeline.config import PolicyConfig
from pipeline.train.base import TrainBackend

SHARD_BYTES = 4 << 30


def export(backend: TrainBackend, policy: PolicyConfig, folder: Path, writes: bool, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the policy below `folder`. Collective; only the rank that `writes` does."""
    if not writes:
        for _ in backend.weights():  # gathering a full tensor needs every rank
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in backend.weights():
        if shard and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(shard, folder, len(shards)))
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    shards.append(_write_shard(shard, folder, len(shards)))
    _name_shards(folder, shards, total)
    config = AutoConfig.from_pretrained(policy.model_name, **policy.hf_config_overrides)
    config.dtype = policy.precision
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy.tokenizer.name).save_pretrained(folder)
    for path in (*folder.iterdir(), folder):
        sync(path)


def _write_shard(shard: dict[str, torch.Tensor], folder: Path, number: int) -> list[str]:
    save_file(shard, folder / f"{number}.partial", metadata={"format": "pt"})
    return list(shard)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """Give the shards the names that transformers and vLLM look for, known only when their number is."""
    if len(shards) == 1:
        (folder / "0.partial").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (folder / f"{i}.partial").rename(folder / name)
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
