"""Measure copies between a GPU and page-locked host memory: what a colocated run offloads, and a reference model."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeline.train.offload import Offload
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place

TENSORS, BYTES = 4, 1 << 30
TURNS = 3


def offload(place: Place) -> Measurement:
    """Measure the first offload, which locks host memory, and the next."""
    size = BYTES if place.full else 1 << 16
    device = torch.device(place.device, 0) if place.device == "cuda" else torch.device("cpu")
    tensors = [torch.full((size,), i, dtype=torch.uint8, device=device) for i in range(TENSORS)]
    moved, measured = Offload(device, shared=True), Measurement(note=f"{TENSORS * size / 1e9:.3g} GB")
    for turn in range(TURNS):
        out, back = place.seconds(lambda: moved.offload(tensors)), place.seconds(moved.reload)
        name = "first" if turn == 0 else "again"
        measured.numbers |= {f"{name} to the host, GB/s": TENSORS * size / out / 1e9}
        measured.numbers |= {f"{name} to the device, GB/s": TENSORS * size / back / 1e9}
    if not all(bool((tensor == i).all()) for i, tensor in enumerate(tensors)):
        measured.problems.append("tensors have changed")
    return measured


def reference(place: Place) -> Measurement:
    """Measure passes of a reference model that waits in host memory, beside those of the policy."""
    from pipeline.train.compiled import trial_batches
    from pipeline.train.fsdp import FSDPBackend
    from pipeline.train.train_backend import ModelRole
    from tests.gpu_check.sizes import SIZES, training_case
    from tests.gpu_check.training import STEPS, drawn_once

    ranks.join(place.device)
    policy = training_case(place, SIZES[place.size], *STEPS["FSDP2 eager"]).load().policy
    with drawn_once():
        trained = FSDPBackend(policy, dist.group.WORLD, 0, ModelRole(reference=True))
    batch = next(trial_batches(policy, trained.device))
    measured = Measurement(note=f"{len(batch.tokens)} tokens")
    for model in ("policy", "reference"):
        passes = [place.seconds(lambda model=model: trained.forward([batch], model)) for _ in range(1 + TURNS)]
        measured.numbers |= {f"{model} first, s": passes[0], f"{model}, s": min(passes[1:])}
    return measured
