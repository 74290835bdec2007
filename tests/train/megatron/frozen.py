"""Checks of frozen parameters on Megatron-Core's train ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from pipeline.models.frozen_names import matched
from pipeline.train.megatron.megatron_backend import MegatronBackend
from tests.train import cases, ranks
from tests.train.megatron import layouts
from tests.train.megatron.layouts import Layout

PATTERNS = {
    "qwen2": ["model.embed_tokens.*", "model.layers.0.*", "*.bias"],  # nothing on the first of two stages trains
    "qwen3_tied": ["model.embed_tokens.*", "*.[qk]_norm.weight"],
    "llama": ["model.layers.1.*", "lm_head.*", "model.norm.*"],  # nothing on the last of two stages trains
    "qwen3_moe": ["*.experts.*", "*.self_attn.[qkv]_proj.*"],
    "deepseek_v3": ["model.layers.[01].*", "*.mlp.gate.*"],
}


def new(folder: Path, family: str, layout: Layout, patterns: Sequence[str], **changes) -> MegatronBackend:
    megatron = {"activation_checkpointing": True} if changes.pop("recompute", False) else {}
    policy = cases.policy(folder / family, freeze_parameters=list(patterns), scheduler=ranks.SCHEDULER, **changes)
    return layouts.backend(policy, layout, **megatron)


def families(changes: Mapping[str, Sequence[bool]], layout: Layout, folder: Path) -> None:
    """changes: {family: whether activations are recomputed, of each check}."""
    for family, all_of in changes.items():
        for recompute in all_of:
            check(folder, family, layout, PATTERNS[family], recompute)
        check_resumed(folder, family, layout, PATTERNS[family])
        layouts.release()


def check(folder: Path, family: str, layout: Layout, patterns: Sequence[str], recompute: bool) -> None:
    """Compare with a run in which all trains: the same gradients of the others, and their norm; no change of frozen weights."""
    whole = new(folder, family, layout, (), recompute=recompute)
    whole.step(layouts.batches(whole, layout), cases.loss)
    expected, _ = layouts.gradients(whole)
    trained = new(folder, family, layout, patterns, recompute=recompute)
    before = layouts.weights(trained)
    norm = trained.step(layouts.batches(trained, layout), cases.loss).metrics["grad_norm"]
    found, _ = layouts.gradients(trained)
    frozen = matched(patterns, trained.shapes)
    assert found.keys() == expected.keys() - frozen
    # Megatron-Core has another function for frozen linear layers, which rounds otherwise in multi-latent attention.
    largest = max(gradient.abs().max().item() for gradient in expected.values()) if family == "deepseek_v3" else 0.0
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max().item() <= 5e-6 * largest, name
    assert abs(torch.stack([g.double().norm() for g in found.values()]).norm().item() / norm - 1) < 1e-6
    for _ in range(2):
        trained.step(layouts.batches(trained, layout, 1), cases.loss)
    held = {id(part.parameter) for part in trained._optimizer.ranges()}
    for local in trained._local.values():
        assert local.tensor.requires_grad or id(local.tensor) not in held
    after = layouts.weights(trained)
    if dist.get_rank() == 0:
        never = {name for name in before if name.endswith("e_score_correction_bias")}
        assert {name for name in before if torch.equal(before[name], after[name])} == frozen | never
        files = load_file(folder / family / "model.safetensors")
        assert all(torch.equal(after[name], files[name]) for name in frozen)


def check_resumed(folder: Path, family: str, layout: Layout, patterns: Sequence[str]) -> None:
    """Check that a run continues from its checkpoint to the bit."""
    trained = new(folder, family, layout, patterns)
    mine = layouts.batches(trained, layout)
    cases.learn(trained, mine)
    saved = folder / f"frozen-{family}-{layout.name}"
    trained.shards().write(saved, dist.get_rank())
    dist.barrier()
    expected, weights = [cases.learn(trained, mine) for _ in range(2)], layouts.weights(trained)
    again = new(folder, family, layout, patterns)
    again.load(saved)
    assert [cases.learn(again, mine) for _ in range(2)] == expected
    found = layouts.weights(again)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
