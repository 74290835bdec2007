"""Checks of train ranks with adapters of experts. Each is called SPMD with (layout, folder), like those of `ranks`."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pipeline.config import LoRAConfig
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from tests.train import adapters, cases, model_roles, ranks
from tests.train.megatron.adapters import expected_of
from tests.train.ranks import Layout

LORA = LoRAConfig(True, dim=3, alpha=7)
KINDS = {
    "all": LORA,
    "experts": replace(LORA, match_all_linear=False, target_modules=["gate_up_proj", "*.experts.down_proj"], use_rslora=True),
    "dora": replace(LORA, dim=2, use_dora=True),
}
RESUMED = "experts"


RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "selective"}


def backend(
    model: Path, layout: Layout, kind: str, role: ModelRole | None = None, recomputed: bool = False, **changes
) -> FSDPBackend:
    dtensor = RECOMPUTED if recomputed else {}
    return ranks.backend(cases.policy(model, **changes), layout, role, lora_cfg=KINDS[kind], **dtensor)


def every_check(families: tuple[str, ...], kinds: tuple[str, ...], layout: Layout, folder: Path) -> None:
    for family in families:
        for kind in kinds:
            check_against_merged(folder / family, layout, kind)
        check_bfloat16(folder / family, layout)
        save(folder / family, layout)


def check_against_merged(model: Path, layout: Layout, kind: str) -> None:
    """Compare log-probs, the reference, merged weights, loss and gradients with the merged model's in float64."""
    trained = backend(model, layout, kind, ModelRole(reference=True))
    mine, packed = model_roles.batches(trained, layout)
    base, _, _ = cases.eager(model)
    before = trained.forward(packed)
    adapters.shake(trained)
    held = {name: ranks.full(p).clone() for name, p in trained._model.hf.named_parameters() if ".lora_" in name}
    with tempfile.TemporaryDirectory() as place:
        scale = trained._model.adapters.spec.scale
        theirs = expected_of(model, adapters.stored(trained, held), scale, {}, Path(place) / "merged")
    assert (torch.cat(theirs.logprobs) - torch.cat(base)).abs().max() > 1e-2
    for chosen, first, without in zip(mine, before, trained.forward(packed, "reference"), strict=True):
        old = torch.cat([base[i] for i in chosen])
        assert (first.logprobs - old).abs().max() < 1e-5  # B is 0
        assert (without.logprobs - old).abs().max() < 1e-5
    cases.check_all_held(cases.check_layout(trained, {n: w.float() for n, w in theirs.weights.items()}, 2e-6))
    expected = theirs.logprobs, theirs.gradients, torch.tensor(theirs.loss)
    ranks.check_step(trained, layout, expected, 5e-6, gradients=lambda it: adapters.stored(it, ranks.gradients(it)))
    assert all(".lora_" in name for name in trained._trained)


def check_bfloat16(model: Path, layout: Layout) -> None:
    """Check experts in bfloat16 with adapters of an odd rank: grouped products of half precision take multiples of 8."""
    trained = backend(model, layout, "experts", precision="bfloat16")
    exact = backend(model, layout, "experts")
    for one in (trained, exact):
        adapters.shake(one)
    _, packed = model_roles.batches(trained, layout)
    for found, wanted in zip(trained.forward(packed), exact.forward(packed), strict=True):
        off = (found.logprobs - wanted.logprobs).abs()
        assert off.median() < 0.05  # a token that a router sends to another expert is far off
    for one in (trained, exact):
        one.step(packed, cases.loss)
    ours, theirs = (torch.cat([g.flatten() for g in ranks.gradients(one).values()]) for one in (trained, exact))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.95 and not torch.equal(ours, theirs)
    assert all(parameter.grad.dtype == torch.float32 for parameter in trained._trained.values())


def _resumable(model: Path, layout: Layout, recomputed: bool = False) -> FSDPBackend:
    return backend(model, layout, RESUMED, recomputed=recomputed, scheduler=ranks.SCHEDULER, max_grad_norm=0.5)


def save(model: Path, layout: Layout) -> None:
    """Write a checkpoint after two steps, with the merged weights and the metrics of the next two steps."""
    trained = _resumable(model, layout)
    _, packed = model_roles.batches(trained, layout)
    for _ in range(2):
        cases.learn(trained, packed)
    place = saved_by(model.parent, layout, model.name)
    trained.shards().write(place, dist.get_rank())
    weights = ranks.weights(trained)
    metrics = [cases.learn(trained, packed) for _ in range(2)]
    dist.barrier()
    if dist.get_rank() == 0:
        ranks.check_written_once(place)
        save_file(weights, place / "weights.st")
        (place / "after.json").write_text(json.dumps(metrics))


def saved_by(folder: Path, layout: Layout, family: str) -> Path:
    return folder / "adapted" / f"{family}-{layout.name}"


def go_on(families: tuple[str, ...], by: Layout, layout: Layout, folder: Path) -> None:
    """Check that what the ranks of another layout, `by`, saved goes on at this one, which recomputes, as it did there."""
    for family in families:
        trained, place = _resumable(folder / family, layout, recomputed=True), saved_by(folder, by, family)
        trained.load(place)
        _, packed = model_roles.batches(trained, layout)
        for theirs in json.loads((place / "after.json").read_text()):
            ours = cases.learn(trained, packed)
            for name in ("loss", "grad_norm", "lr"):
                assert abs(ours[name] - theirs[name]) <= 1e-5 * max(abs(theirs[name]), 0.01), (family, name)
