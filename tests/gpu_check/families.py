"""Compare small models with Hugging Face eager in float64: log-probs, gradients, a step; and count the waits for the GPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pipeline.train.train_backend import TrainBackend
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.waits import counted
from tests.train import cases

FAMILIES = ("llama", "qwen3_moe")
NEAR = {"bfloat16": (0.5, 0.1), "float32": (1e-4, 1e-4)}
"""The tests' tolerances: of log-probs, and of gradients as a share of the largest entry."""


Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Backend:
    new: Callable[[Path, str], TrainBackend]  # of a checkpoint in a precision
    gradients: Callable[[TrainBackend], Gradients]  # of the last step
    layers: Callable[[TrainBackend], Sequence[nn.Module]]
    expected: Callable[[Path], tuple[torch.Tensor, Gradients]]  # log-probs and gradients of a checkpoint


def fsdp2(place: Place) -> Measurement:
    from tests.train import ranks as fsdp

    def new(model: Path, precision: str) -> TrainBackend:
        return fsdp.backend(cases.policy(model, precision=precision), compile=False)

    def expected(model: Path) -> tuple[torch.Tensor, Gradients]:
        logprobs, gradients, _ = cases.eager(model)
        return torch.cat(logprobs), gradients

    return _families(place, Backend(new, fsdp.gradients, lambda it: it._model.hf.base_model.layers, expected))


def megatron(place: Place) -> Measurement:
    from pipeline.train.megatron.model import transformer_engine
    from tests.train.megatron import layouts

    def new(model: Path, precision: str) -> TrainBackend:
        return layouts.backend(cases.policy(model, precision=precision))

    def expected(model: Path) -> tuple[torch.Tensor, Gradients]:
        layouts.write_expected(model)
        measured = layouts.expected(model)
        return torch.cat(measured.logprobs), measured.gradients

    backend = Backend(new, lambda it: layouts.gradients(it)[0], lambda it: it._stage.decoder.layers, expected)
    # TransformerEngine's attention has no float32.
    return _families(place, backend, ("bfloat16",) if transformer_engine() else NEAR)


def _families(place: Place, backend: Backend, precisions: Iterable[str] = NEAR) -> Measurement:
    ranks.join(place.device)
    models = place.folder / "models"
    if not models.exists():
        cases.write_models(models)
    measured = Measurement()
    for precision in precisions:
        compare = functools.partial(_compare, place, measured, backend, precision=precision)
        measured.attempt({f"{family}, {precision}": functools.partial(compare, models / family) for family in FAMILIES})
    return measured


def _compare(place: Place, measured: Measurement, backend: Backend, model: Path, precision: str) -> None:
    """Add the differences of one model in one precision, and its waits."""
    trained = backend.new(model, precision)
    layers = backend.layers(trained)
    batch = cases.pack(list(range(len(cases.LENGTHS))), place.device)
    trained.forward([batch])  # kernels are made
    with counted(place, layers) as waits:
        logprobs = trained.forward([batch])[0].logprobs
    with counted(place, layers) as of_step:
        metrics = trained.step([batch], cases.loss).metrics
    name, (near, gradients_near) = f"{model.name} {precision}", NEAR[precision]
    theirs, expected = backend.expected(model)
    measured.limit(f"{name} log-probs", _largest(logprobs.cpu() - theirs), near)
    ours, largest = backend.gradients(trained), max(map(_largest, expected.values()))
    worst = max(_largest(ours[key].cpu().double() - gradient) for key, gradient in expected.items())
    measured.limit(f"{name} gradients", worst / largest, gradients_near)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    measured.limit(f"{name} norm", abs(metrics["grad_norm"] / norm - 1), gradients_near)
    if precision == "bfloat16" and place.device == "cuda":
        measured.numbers |= {
            f"{model.name} waits in layers": len(waits.inside),
            f"{model.name} waits in a step": len(of_step.places),
        }
        # Not Counters, whose keys dataclasses.asdict turns into pairs.
        measured.details[model.name] = {"in layers": dict(Counter(waits.inside)), "in a step": dict(Counter(of_step.places))}


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()
