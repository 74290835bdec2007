"""Measure training steps of a model of random weights, of Llama's shape: the steps of a real `TrainRole`.

The share of the peak (MFU) counts the operations that pipeline/models/flops.py counts, without recomputation. Memory is the
most that torch's allocator gave out, beside what the plan predicts of tensors, and what it reserved.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from launch.plan import memory
from launch.plan.rank_division import train_parallelism
from pipeline.config import hardware
from pipeline.models import flops
from pipeline.train import initial_weights
from tests.gpu_check import ranks
from tests.gpu_check.measurement import Measurement, Numbers, Place
from tests.gpu_check.sizes import SIZES, Size, training_case
from tests.launch.plan.measure import Run

STEPS = {
    "FSDP2": ("policy.dtensor_cfg.enabled=true",),
    "FSDP2 eager": ("policy.dtensor_cfg.enabled=true", "policy.dtensor_cfg.compile=false"),
    "Megatron-Core": ("policy.megatron_cfg.enabled=true",),
}
"""Keys by the name of a training step. On a GPU layers are compiled where no key says otherwise."""
COMPILE = "policy.dtensor_cfg.compile=true"
WARM_UP = 2


def step(place: Place, name: str) -> Measurement:
    """Measure a step on one rank."""
    size = SIZES[place.size]
    ranks.join(place.device)
    with drawn_once():
        numbers, parameters = _measure(place, name, size)
    measured = Measurement(numbers, f"{parameters / 1e9:.2g}e9 parameters, {size.sequences} x {size.length} tokens")
    if numbers.get("graphs of other packings"):
        measured.problems.append("layers are compiled again for other packings")
    return measured


def on_all_gpus(place: Place, name: str) -> Measurement:
    """Measure a step of all GPUs, or of two ranks on the CPU; each has as many tokens as one alone."""
    count = place.gpus or 2
    numbers, parameters = ranks.over(count, _rank, place, name, count)[0]
    return Measurement(numbers, f"{parameters / 1e9:.2g}e9 parameters, {count} ranks")


def _rank(rank: int, folder: Path, place: Place, name: str, count: int) -> tuple[Numbers, float]:
    ranks.join(place.device, rank, count, folder)
    result = _measure(place, name, SIZES[place.size], count)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _measure(place: Place, name: str, size: Size, count: int = 1) -> tuple[Numbers, float]:
    """Return (numbers of one rank, parameters)."""
    tokens, pairs = (count * size.sequences * each for each in (size.length, size.length**2 / 2))
    keys = STEPS[name] + ((COMPILE,) if name == "FSDP2" and place.device == "cpu" and count == 1 else ())
    case = training_case(place, size, *keys, ranks=count)
    recipe = case.load()
    shapes = case.shapes(recipe)
    phases: dict[str, float] = {}
    held = torch.cuda.memory_allocated() if place.device == "cuda" else 0  # by an earlier part
    start = time.perf_counter()
    run = Run(recipe, dist.get_rank(), shapes["policy"].vocabulary, _timed(phases))
    numbers: Numbers = {"set up, s": time.perf_counter() - start, "compile, s": phases.get("compile")}
    for _ in range(WARM_UP):
        _step(run)
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spent = statistics.median(place.seconds(lambda: _step(run)) for _ in range(size.steps))
    rate = 3 * flops.forward(shapes["policy"], tokens, pairs) / spent / count
    numbers |= {"tokens/s": tokens / spent, "step, s": spent, "TFLOP/s a rank": rate / 1e12, "MFU": None}
    if place.device == "cuda":
        described = hardware.of_device(torch.cuda.get_device_name())
        numbers |= {"MFU": rate / 1e12 / hardware.gpu(described).bf16_tflops if described else None}
        numbers |= {"GB": (torch.cuda.max_memory_allocated() - held) / 1e9}
        predicted = memory.train(recipe, shapes)
        own = predicted.total - predicted.parts.get("runtime", 0.0)
        own -= memory.staging(recipe, shapes["policy"], train_parallelism(recipe.policy, recipe.cluster.train))
        numbers |= {"plan's GB": own / 1e9}
    if "compile" in phases and count == 1:
        numbers |= _other_packings(run, size)
    if place.device == "cuda":
        numbers |= {"GB reserved": torch.cuda.max_memory_reserved() / 1e9, "GB left by earlier parts": held / 1e9}
    return numbers, shapes["policy"].parameters


def _step(run: Run) -> None:
    for _ in run.step():
        pass


def _timed(phases: dict[str, float]):
    """Return `phase`, which adds the seconds of each phase to `phases`."""

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start

    return phase


def _other_packings(run: Run, size: Size) -> Numbers:
    """Take steps of sequences of other lengths. Nothing is to be compiled for them."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    for lengths in packings(size):
        run.take(lengths)
        _step(run)
    return {"graphs": before, "graphs of other packings": counters["stats"]["unique_graphs"] - before}


def packings(size: Size) -> list[list[int]]:
    """Return six lists of lengths of as many sequences, whose sums differ."""
    shares = ((1, 1, 1, 1), (1, 2, 3, 4), (1, 8, 8, 8), (2, 2, 5, 7), (16, 16, 16, 16), (1, 1, 1, 9))
    return [[max(3, size.length // share) for share in of[: size.sequences]] for of in shares]


@contextlib.contextmanager
def drawn_once() -> Iterator[None]:
    """Draw random weights once for all steps of this process: 1.5e9 of them take a processor 10 seconds."""

    def drawn(config, seed: int, head: str):
        key = (config.to_json_string(), seed, head)
        if key not in DRAWN:
            DRAWN[key] = draw(config, seed, head)
        return DRAWN[key]

    draw = initial_weights._random
    with mock.patch.object(initial_weights, "_random", drawn):
        yield


DRAWN: dict[tuple[str, int, str], initial_weights.ReadBox] = {}
