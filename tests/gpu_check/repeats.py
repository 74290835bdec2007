"""Is the same backward pass the same to the last bit, with deterministic operators and without?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from pipeline.config.determinism import OF_TRAINING, SHARED
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.sizes import REPEATED, training_case

TIMES = 3


def equal(work: Callable[[], Sequence[torch.Tensor]]) -> bool:
    """Return whether several calls return the same bits."""
    first, *others = ([tensor.clone() for tensor in work()] for _ in range(TIMES))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def training(place: Place) -> Measurement:
    """Compare the gradients of whole training steps, without and with `policy.deterministic`.

    Both have the variables of `policy.deterministic`, which libraries read once in a process.
    """
    os.environ |= SHARED | OF_TRAINING
    ranks.join(place.device)
    size, measured = REPEATED[place.size], Measurement()
    for name, on in (("deterministic", True), ("default", False)):  # FlashAttention-3, a default, stays for the process
        same, seconds = _steps(place, on)
        torch.use_deterministic_algorithms(False)
        measured.numbers |= {f"{name}, equal": float(same), f"{name}, s": seconds}
    if not measured.numbers["deterministic, equal"]:
        measured.problems.append(f"{TIMES} deterministic backward passes differ")
    measured.note = f"{TIMES} steps of {size.sequences} x {size.length} tokens; 1: equal to the last bit"
    return measured


def _steps(place: Place, on: bool) -> tuple[bool, float]:
    """Return (whether all steps have the same gradients, seconds of a step). The learning rate is 0, so no weight changes."""
    from tests.launch.plan.measure import Run
    from tests.train.ranks import gradients

    case = training_case(
        place,
        REPEATED[place.size],
        "policy.dtensor_cfg.enabled=true",
        "policy.dtensor_cfg.compile=false",
        "policy.optimizer.kwargs.lr=0.0",
        f"policy.deterministic={str(on).lower()}",
    )
    recipe = case.load()
    run = Run(recipe, 0, case.shapes(recipe)["policy"].vocabulary)
    seconds: list[float] = []

    def step() -> list[torch.Tensor]:
        seconds.append(place.seconds(lambda: [*run.step()]))
        return [*gradients(run.policy).values()]

    step()  # the optimizer's state is made
    return equal(step), min(seconds[1:])
