"""Compare the gradient's norm on Megatron-Core: ours, Megatron-Core's own, and that of the float32 gradients in float64."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place
from tests.train import cases

FAMILIES = ("llama", "mixtral")
NEAR = 1e-5
"""Megatron-Core sums in float32."""
GRADIENTS_NEAR = 0.1  # in bfloat16, as a share of the largest entry: the tests' tolerance


def one_rank(place: Place) -> Measurement:
    return _measurement([_rank(0, place.folder, place, 1)])


def two_ranks(place: Place) -> Measurement:
    """Check a dense model under tensor parallelism and a mixture under expert parallelism."""
    return _measurement(ranks.over(2, _rank, place, 2))


def _measurement(ranks_norms: list[dict[str, dict[str, float]]]) -> Measurement:
    measured = Measurement()
    for name, numbers in ranks_norms[0].items():
        measured.limit(f"{name}, ours", numbers["ours"], NEAR)
        measured.limit(f"{name}, Megatron-Core's", numbers["theirs"], NEAR)
        measured.limit(f"{name}, gradients", numbers["gradients"], GRADIENTS_NEAR)
    measured.note = "differences from the norm of all float32 gradients, as a share of it; of gradients from Hugging Face's"
    return measured


def _rank(rank: int, folder: Path, place: Place, count: int) -> dict[str, dict[str, float]]:
    """Return the differences by layout."""
    from tests.train.megatron import layouts

    device = ranks.join(place.device, rank, count, folder if count > 1 else None)
    models = folder / "models"
    if rank == 0 and not models.exists():
        cases.write_models(models)
    dist.barrier()
    of = (layouts.ONE, layouts.ONE) if count == 1 else (layouts.TP2, layouts.EP2)
    tests = dict(zip(FAMILIES, of, strict=True))
    measured = {f"{family} {layout.name}": _norms(models / family, layout, device) for family, layout in tests.items()}
    dist.barrier()
    layouts.release()
    return measured


def _norms(model: Path, layout, device: torch.device) -> dict[str, float]:
    from tests.train.megatron import layouts
    from tests.train.ranks import batches

    trained = layouts.backend(cases.policy(model, precision="bfloat16"), layout)
    metrics, theirs = layouts.step_with_both_norms(trained, batches(trained, layout))
    gradients, _ = layouts.gradients(trained)
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm().item()
    layouts.write_expected(model) if dist.get_rank() == 0 else None
    dist.barrier()
    expected = layouts.expected(model).gradients
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    worst = max((gradients[name].double() - tensor).abs().max().item() for name, tensor in expected.items())
    return {"ours": abs(metrics["grad_norm"] / norm - 1), "theirs": abs(theirs / norm - 1), "gradients": worst / largest}
