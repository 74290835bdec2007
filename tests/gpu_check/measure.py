"""Take one measurement in its own process: python -m tests.gpu_check.measure train|decode|refit NAME cuda|cpu full|tiny

Its last line holds the numbers. Weights are random; the policy is Llama's shape.

    train    the steps of a real `TrainRole` on sequences of equal length, packed into one microbatch. The share of the peak
             (MFU) counts the operations that pipeline/models/flops.py counts, without recomputation. Memory is the most that
             torch's allocator gave out, beside what the plan predicts of tensors.
    decode   one engine, all requests at once, to the last token of each
    refit    two train and two generate processes, planned; over NCCL where four GPUs are, else through host memory, as where
             train and generate ranks share GPUs. The digest's share is that of the generate ranks' seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from launch.plan import memory
from launch.plan.parallelism import train_parallelism
from pipeline import generate
from pipeline.config import hardware
from pipeline.models import flops
from pipeline.types import Request, Sampling
from tests.gpu_check.parts import RESULT, STEPS
from tests.launch.plan.memory_cases import Case

Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Size:
    model: dict[str, int]  # changes of recipes/tiny/config.json
    sequences: int
    length: int  # of each sequence, in tokens
    steps: int  # measured, after WARM_UP
    requests: int
    prompt: int  # tokens
    answer: int  # tokens


LLAMA_1B = {  # Llama 3.2 1B, with an output layer of its own
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SIZES = {
    "full": Size(LLAMA_1B, sequences=4, length=4096, steps=5, requests=128, prompt=128, answer=256),
    "tiny": Size({}, sequences=4, length=32, steps=1, requests=4, prompt=8, answer=8),
}
WARM_UP = 2
TURNS = 5  # of a refit
PEAKS = ("gb200", "b200", "h200", "h100")  # in recipes/hardware/; the first that a GPU's name contains


def _case(name: str, recipe: str, size: Size, device: str, *overrides: str) -> Case:
    precision = "bfloat16" if device == "cuda" else "float32"
    given = (f"policy.precision={precision}", *overrides)
    return Case(name, recipe, gpus=int(device == "cuda"), overrides=given, changes=size.model)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- a training step --------------------------------------------------------------------------------------------------------


def train(name: str, device: str, size: Size) -> tuple[Numbers, str]:
    from tests.launch.plan.measure import Run  # it has a train rank's imports

    tokens = size.sequences * size.length
    keys = ("train_mb_tokens", "logprob_mb_tokens")
    packed = [f"policy.sequence_packing.{key}={tokens}" for key in keys]
    lengths = [f"policy.train_global_batch_size={size.sequences}", f"policy.max_total_sequence_length={size.length}"]
    case = _case("step", "tiny_sft", size, device, *STEPS[name], *packed, *lengths)
    recipe = case.load()
    shapes = case.shapes(recipe)
    _join(device)
    run = Run(recipe, 0, shapes["policy"].vocabulary)
    seconds = []
    for step in range(WARM_UP + size.steps):
        if step == WARM_UP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        for _ in run.step():
            pass
        _wait(device)
        seconds.append(time.perf_counter() - start)
    spent = statistics.median(seconds[WARM_UP:])
    pairs = size.sequences * size.length**2 / 2
    rate = 3 * flops.forward(shapes["policy"], tokens, pairs) / spent
    predicted = memory.train(recipe, shapes)
    own = predicted.total - predicted.parts.get("runtime", 0.0)
    own -= memory.staging(recipe, shapes["policy"], train_parallelism(recipe.policy, recipe.cluster.train))
    numbers: Numbers = {"tokens/s": tokens / spent, "step, s": spent, "TFLOP/s": rate / 1e12, "MFU": None}
    if device == "cuda":
        peak = next((hardware.gpu(each).bf16_tflops for each in PEAKS if each in torch.cuda.get_device_name().lower()), None)
        most = torch.cuda.max_memory_allocated()
        numbers |= {"MFU": peak and rate / 1e12 / peak, "GB": most / 1e9, "plan's GB": own / 1e9}
    return numbers, f"{shapes['policy'].parameters / 1e9:.2g}e9 parameters, {tokens} tokens a step"


def _join(device: str) -> None:
    """Make this process a world of one rank."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


# ---- decoding ---------------------------------------------------------------------------------------------------------------


def decode(name: str, device: str, size: Size) -> tuple[Numbers, str]:
    """name: the generation backend."""
    overrides = [
        f"policy.generation.backend={name}",
        f"policy.generation.max_num_seqs={size.requests}",
        f"policy.max_total_sequence_length={size.prompt + size.answer}",
        f"policy.generation.vllm_cfg.enforce_eager={str(device == 'cpu').lower()}",
    ]
    recipe = _case("decode", "tiny_grpo", size, device, *overrides).load()
    policy = recipe.policy
    policy.generation.vllm_kwargs.clear()  # the cache has the size that the backend gives it
    engine = generate.build(policy, 1, 0, 0)
    draw = torch.Generator().manual_seed(0)
    weights = ((name, 0.02 * torch.randn(shape, generator=draw)) for name, shape in engine.shapes.items())
    dtype = getattr(torch, policy.precision)
    update = engine.update()
    update.load((name, tensor.to(device, dtype)) for name, tensor in weights)
    update.commit(0)
    vocabulary = int(size.model.get("vocab_size", 64))
    _drain(engine, _requests(size, vocabulary, size.answer // 4))  # graphs and kernels are made
    _wait(device)
    start = time.perf_counter()
    drawn = _drain(engine, _requests(size, vocabulary, size.answer))
    _wait(device)
    spent = time.perf_counter() - start
    return {"tokens/s": drawn / spent, "s": spent}, f"{size.requests} requests, {size.prompt} + {size.answer} tokens each"


def _requests(size: Size, vocabulary: int, answer: int) -> list[Request]:
    random, settings = np.random.default_rng(0), Sampling(max_new_tokens=answer)
    prompts = random.integers(3, vocabulary, (size.requests, size.prompt)).astype(np.int32)
    return [Request(f"{answer}/{i}", prompt, i, settings) for i, prompt in enumerate(prompts)]


def _drain(engine: generate.base.GenerateBackend, requests: list[Request]) -> int:
    """Return the number of drawn tokens."""
    engine.add(requests)
    drawn = 0
    while engine.pending:
        drawn += sum(len(completion.tokens) for completion in engine.step())
    return drawn


# ---- a refit ----------------------------------------------------------------------------------------------------------------


def refit(name: str, device: str, size: Size) -> tuple[Numbers, str]:
    import torch.multiprocessing as mp

    from tests.refit import ranks

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_refit_rank, (Path(folder), gpus, bool(size.model)), nprocs=4, start_method="spawn")
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(4)]
    receivers = [reports[rank] for rank in ranks.GENERATE]
    spent = max(statistics.median(report["seconds"]) for report in reports)
    moved = sum(report["bytes"] for report in receivers)
    share = statistics.median(part for report in receivers for part in report["digest"])
    how = "over NCCL" if gpus >= 4 else "through host memory" if gpus else "over gloo"
    return {"GB/s": moved / spent / 1e9, "s": spent, "digest's share": share}, f"{moved / 1e6:.3g} MB {how}, 2 + 2 processes"


def _refit_rank(rank: int, folder: Path, gpus: int, large: bool) -> None:
    from tests.benchmarks import refit_transfer
    from tests.refit import ranks

    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    apart = gpus >= 4
    backend = "cpu:gloo,cuda:nccl" if apart else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=4)
    spanning = dist.group.WORLD
    realms = [dist.new_group(members) for members in (ranks.TRAIN, ranks.GENERATE)]
    refit_group = dist.new_group((0, *ranks.GENERATE))
    own = dist.group.WORLD = realms[rank in ranks.GENERATE]
    carrier = device if apart else torch.device("cpu")
    world = ranks.World(rank, device, spanning, own, refit_group if rank != 1 else None, carrier)
    model = refit_transfer.llama() if large else ranks.AWKWARD
    precision, engines = torch.bfloat16, (ranks.GENERATE,)
    made = ranks.backends(model, engines, precision, precision, device)
    plan = ranks.planned(model, made, engines, precision, refit_transfer.BUCKET_BYTES)
    mine = made[rank]
    del made
    transfer = ranks.prepared(world, mine, precision, "planned", plan)
    seconds, digest = [], []
    for turn in range(WARM_UP + TURNS):
        dist.barrier(group=spanning)
        start = time.perf_counter()
        report = refit_transfer.refit_once(world, transfer, mine)
        _wait(device.type)
        if turn >= WARM_UP:
            seconds.append(time.perf_counter() - start)
            digest.append(report.digest / report.total)
    told = {"seconds": seconds, "digest": digest, "bytes": report.received}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier(group=spanning)
    dist.group.WORLD = spanning
    dist.destroy_process_group()


KINDS: dict[str, Callable[[str, str, Size], tuple[Numbers, str]]] = {"train": train, "decode": decode, "refit": refit}


def main(kind: str, name: str, device: str, size: str) -> None:
    numbers, note = KINDS[kind](name, device, SIZES[size])
    told = {"numbers": numbers, "note": note}
    print(f"\n{RESULT}{json.dumps(told)}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
