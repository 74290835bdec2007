"""Measure memory of a conversion: `pytest -m long tests/train/megatron/test_conversion_memory.py` prints the peak."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import LlamaConfig

from pipeline.models.hugging_face import checkpoint_shapes
from tests.train.megatron.test_conversion import convert


def write_2gb(folder: Path) -> int:
    """Write a Llama of a billion random bfloat16 weights, one file per layer. Return its size in bytes."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in checkpoint_shapes(config)[0].items():
        layer = name.split(".")[2] if ".layers." in name else "ends"
        bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)
        files.setdefault(f"model-{layer}.safetensors", {})[name] = bits.view(torch.bfloat16)
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def resident() -> dict[str, float]:
    """Return this process's memory in MB, file mappings included: now (VmRSS) and at its peak (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {key: int(lines[key].split()[0]) / 1e3 for key in ("VmRSS", "VmHWM")}


def convert_measured(checkpoint: Path, shared: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here; ru_maxrss would be the parent's
    before, start = resident(), time.monotonic()
    convert(checkpoint, shared)
    result = {"mb": resident()["VmHWM"] - before["VmRSS"], "s": time.monotonic() - start}
    (shared / "result").write_text(json.dumps(result))


@pytest.mark.long
def test_memory_is_bounded_by_the_largest_parameter(tmp_path, capsys):
    shared = tmp_path / "shared"
    size = write_2gb(tmp_path / "model")
    process = multiprocessing.get_context("spawn").Process(target=convert_measured, args=(tmp_path / "model", shared))
    process.start()
    process.join()
    assert process.exitcode == 0
    result = json.loads((shared / "result").read_text())
    largest = 2 * 32000 * 2048 / 1e6  # the embedding, in bfloat16
    with capsys.disabled():
        print(f"\n{size / 1e9:.2f} GB converted in {result['s']:.1f} s, peak memory {result['mb']:.0f} MB above the start")
    assert result["mb"] < 2 * largest + 200
