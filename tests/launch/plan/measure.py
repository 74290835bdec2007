"""Measure a train rank's memory: `TrainRole` on samples of random tokens, with every allocation recorded.

`tensors` counts the bytes of all tensors, temporary ones inside operators too, by torch's profiler, which sees each allocation
and release of torch's CPU allocator. `cuda` is the peak of CUDA's allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from launch.plan.memory_generate import generate as generate_memory
from pipeline import algorithms
from pipeline.config import RECIPES, Recipe
from pipeline.data.batches import split_batch
from pipeline.roles.train import TrainRole
from pipeline.train.train_backend import Phase, TrainBackend
from pipeline.types import DataParallelRank, Sample
from tests import cuda_world
from tests.launch.plan.memory_cases import Case


def measured(case: Case, folder: Path, kind: str = "tensors") -> float:
    """Return the bytes of the fullest rank, or with experts spread over ranks the mean over ranks.

    The plan assumes that tokens spread evenly, and a random router sends some experts far more than others. kind: "tensors",
    "cuda".
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, "pipeline.train.fsdp"])
    out = folder / f"{case.name}-{kind}"
    out.mkdir()
    mp.start_processes(_rank, (case, out, kind), nprocs=case.ranks, start_method="forkserver")
    found = [float((out / str(rank)).read_text()) for rank in range(case.ranks)]
    policy = case.load().policy
    spread = policy.megatron_cfg.expert_model_parallel_size > 1 or policy.dtensor_cfg.expert_parallel_size > 1
    return sum(found) / len(found) if spread else max(found)


def _rank(rank: int, case: Case, out: Path, kind: str) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if kind != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device, timeout = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu"), datetime.timedelta(seconds=300)
    cuda_world.join(device, init_method=f"file://{out}/store", rank=rank, world_size=case.ranks, timeout=timeout)
    if case.recipe == "tiny_distillation":
        case = _with_teacher(case, out, rank)
    found = {"tensors": _tensors, "cuda": _cuda}[kind](case, rank)
    dist.barrier()
    (out / str(rank)).write_text(str(found))
    dist.destroy_process_group()


def _with_teacher(case: Case, out: Path, rank: int) -> Case:
    """Write a teacher's files: it is not initialized at random as other models here are."""
    if rank == 0:
        model = AutoConfig.from_pretrained(RECIPES / case.model)
        AutoModelForCausalLM.from_config(model).save_pretrained(out / "teacher")
    dist.barrier()
    return dataclasses.replace(case, overrides=(*case.overrides, f"teacher.model_name={out / 'teacher'}"))


# ---- the run ------------------------------------------------------------------------------------------------------------


class Run:
    """A train rank's steps."""

    def __init__(self, recipe: Recipe, rank: int, vocabulary: int, phase: Phase = contextlib.nullcontext):
        world = SimpleNamespace(own=dist.group.WORLD, rank=rank, phase=phase)
        self._recipe, self._vocabulary = recipe, vocabulary
        self._algorithm = algorithms.build(recipe)
        self._role = TrainRole(recipe, 0, world, self._algorithm, None)
        self._place = self._role.setup()
        count = recipe.policy.train_global_batch_size * self._algorithm.sequences_per_item
        self.take([recipe.policy.max_total_sequence_length] * count)

    @property
    def policy(self) -> TrainBackend:
        """The backend that learns."""
        return self._role._models["policy"]

    def take(self, lengths: Sequence[int]) -> None:
        """Use sequences of these lengths in the next steps."""
        self._updates = _updates(self._recipe, self._place, self._vocabulary, lengths, self._algorithm.sequences_per_item)

    def step(self) -> Iterator[str]:
        """Run one step; yield the name of each phase before it begins."""
        yield "forward"
        self._role.load(self._updates)
        self._role.forward()
        if self._algorithm.needs.estimates:
            self._role.estimate()
        yield "step"
        self._role.step(list(self._algorithm.losses))


def _updates(recipe: Recipe, place: DataParallelRank, vocabulary: int, lengths: Sequence[int], together: int) -> list:
    """Return this rank's share of sequences of these lengths for one optimizer step."""
    policy, random = recipe.policy, np.random.default_rng(0)
    samples = [_sample(random.integers(3, vocabulary, length)) for length in lengths]
    places = [DataParallelRank(rank, place.size) for rank in range(place.size)]
    return split_batch(samples, policy, places, policy.train_global_batch_size, together)[place.rank]


def _sample(tokens: np.ndarray) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens.astype(np.int32), np.arange(len(tokens)) > 1, zeros - 1, zeros)


# ---- tensors ------------------------------------------------------------------------------------------------------------


def _tensors(case: Case, rank: int) -> float:
    """Return the smallest of the later steps' peaks.

    The profiler does not see what a thread of Gloo's releases. The figure is then too large until that address is used
    again, and never too small.
    """
    recipe, marks = case.load(), []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False)
    profiler.__enter__()
    run = Run(recipe, rank, case.shapes(recipe)["policy"].vocabulary)
    steps = 2 if case.ranks == 1 else 4
    for step in range(steps):
        marks += [Mark(step, phase, time.time_ns(), _addresses()) for phase in run.step()]
    marks.append(Mark(steps, "end", time.time_ns(), set()))
    profiler.__exit__(None, None, None)
    changes = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    found = peaks(changes, marks)
    return max(min(sizes[1:]) for sizes in found.values())  # the first step has no optimizer state yet


@dataclasses.dataclass(frozen=True)
class Mark:
    """The beginning of a phase."""

    step: int
    phase: str
    moment: int  # ns
    addresses: set[int]  # of the tensors that live; between phases Python knows all of them


def _addresses() -> set[int]:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors += [inner for thing in tensors if issubclass(type(thing), DTensor) for inner in (thing._local_tensor,)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if type(tensor) is not DTensor}


def _allocations(events: list) -> Iterator[tuple[int, int, int]]:
    """Return (time in ns, address, bytes; below 0 when released) of each allocation."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag.name == "Allocation":
            yield event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size


def peaks(changes: list[tuple[int, int, int]], marks: list[Mark]) -> dict[str, list[int]]:
    """Return the maximum bytes allocated at once between each mark and the next; by phase, in the order of steps."""
    found: dict[str, list[int]] = {}
    live: dict[int, int] = {}
    upcoming = iter(changes)
    change = next(upcoming, None)
    for mark, end in zip([None, *marks], [*marks, None], strict=True):
        if mark is not None:
            live = {address: size for address, size in live.items() if address in mark.addresses}
        total = most = sum(live.values())
        while change is not None and (end is None or change[0] < end.moment):
            _, address, size = change
            total -= live.pop(address, 0)
            if size > 0:
                live[address] = size
                total += size
                most = max(most, total)
            change = next(upcoming, None)
        if mark is not None and end is not None:
            found.setdefault(mark.phase, []).append(most)
    return found


def _steps(case: Case, rank: int) -> None:
    """Run two steps: the second one finds the optimizer's state."""
    recipe = case.load()
    run = Run(recipe, rank, case.shapes(recipe)["policy"].vocabulary)
    for _ in range(2):
        for _ in run.step():
            pass


def _cuda(case: Case, rank: int) -> float:
    """Return the peak bytes of torch's allocator, less what a smaller run leaves (cuBLAS's workspace)."""
    _steps(case.small, rank)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _steps(case, rank)
    return torch.cuda.max_memory_allocated() - before


# ---- vLLM ---------------------------------------------------------------------------------------------------------------

ENGINES = (("tiny", "float32"), ("tiny", "bfloat16"), ("tiny_moe", "bfloat16"))


def engine(model: str, precision: str, folder: Path) -> dict[str, tuple[float, float]]:
    """Return (predicted, measured) bytes of weights and of the KV cache, and its tokens, of an engine on one CPU rank."""
    out = folder / f"engine-{model}-{precision}"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_engine, args=(model, precision, out))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the engine of {model} ended with status {process.exitcode}")
    return {part: tuple(pair) for part, pair in json.loads(out.read_text()).items()}


def _engine(model: str, precision: str, out: Path) -> None:
    from pipeline import generate

    recipe = Case("engine", "tiny_grpo", model, overrides=(f"policy.precision={precision}",)).load()
    recipe.policy.generation.vllm_kwargs.clear()  # the cache has the size that the backend gives it
    predicted = generate_memory(recipe, Case("engine", model=model).shapes(recipe)["policy"])
    backend = generate.build(recipe.policy, 1, 0, 0)
    # Kernels keep weights in forms of their own; what they are made from is what the modules' raw parameters take.
    raw = {name: form for described in backend._units.values() for name, form in described.raw.items()}
    weights = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in raw.values())
    (worker,) = backend._engine.collective_rpc(lambda worker: worker)
    caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in worker.model_runner.kv_caches}
    cache = backend._config.cache_config
    found = {
        "weights": (predicted.parts["weights"], weights),
        "KV cache": (predicted.parts["KV cache"], sum(caches.values())),
        "tokens": (predicted.tokens, (cache.num_gpu_blocks - 1) * cache.block_size),
    }
    out.write_text(json.dumps(found))
