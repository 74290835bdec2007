"""Compare compiled decoder layers with eager ones on FSDP2: numerical differences, and CPU seconds of a training step.

`python -m tests.benchmarks.compiled_step CASE FOLDER`, with the checkpoint of CASE in FOLDER. Both train in this process and
take one step in turns, from the same weights on the same samples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.data.packing import pack
from tests.benchmarks.cases import CASES, Case
from tests.benchmarks.our_step import join_alone
from tests.benchmarks.report import CPU, WALL, MeasuredRun
from tests.benchmarks.train_step import TrainStep, microbatches, samples_of


def compare(case: Case, folder: Path) -> None:
    eager, started = TrainStep(case, folder, "fsdp", "packed"), (time.process_time(), time.time())
    compiled = TrainStep(case, folder, "fsdp", "packed", compiled=True)
    built = time.process_time() - started[0], time.time() - started[1]
    batches = [pack(members, torch.device("cpu")) for members in microbatches(case, samples_of(case, 0), padded=False)]
    logprobs = [torch.cat([out.logprobs for out in trained.backend.forward(batches)]) for trained in (eager, compiled)]
    of_logprobs = (logprobs[0] - logprobs[1]).abs().max().item()
    measured = {"eager": MeasuredRun("eager layers"), "compiled": MeasuredRun("compiled layers")}
    of_gradients = 0.0
    for step in range(case.warmup + case.steps):
        for name, trained in (("eager", eager), ("compiled", compiled)):
            trained.step()
            if step >= case.warmup:
                measured[name].times.append(trained.clock.take())
            else:
                trained.clock.take()
        if step == 0:
            of_gradients = _difference(compiled, eager)
    print(
        f"\n{case.name}: {case.parameters / 1e6:.2f}M parameters, float32, FSDP2 on one rank, {sum(case.tokens)} tokens in"
        f" {len(batches)} microbatches. One thread. {case.steps} steps, in turns, after {case.warmup} for warming up.\n"
        f"log-probs: at most {of_logprobs:.1e} apart; gradients of the first step: {of_gradients:.1e} of the largest\n"
        f"building the compiled model: {built[0]:.0f} CPU s in this process, {built[1]:.0f} s, what is cached included\n"
        f"{'seconds a step':24s} {'CPU min':>9s} {'median':>9s} {'wall min':>9s} {'median':>9s}"
    )
    for record in measured.values():
        for title, phases in ((record.name, record.phases), *((f"  {phase}", [phase]) for phase in record.phases)):
            cpu, wall = (sorted(record.part(phases, clock)) for clock in (CPU, WALL))
            middle = len(cpu) // 2
            print(f"{title:24s} {cpu[0]:9.3f} {cpu[middle]:9.3f} {wall[0]:9.3f} {wall[middle]:9.3f}")
    ratio = measured["eager"].median(CPU) / measured["compiled"].median(CPU)
    print(f"compiled layers are {ratio:.2f} times as fast")


def _difference(ours: TrainStep, theirs: TrainStep) -> float:
    """Return the largest difference of a gradient's entry, as a share of the largest entry."""
    pairs = list(zip(*(trained.backend._gradients.local().values() for trained in (ours, theirs)), strict=True))
    return max((a - b).abs().max().item() for a, b in pairs) / max(b.abs().max().item() for _, b in pairs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    join_alone()
    compare(CASES[sys.argv[1]], Path(sys.argv[2]))
    dist.destroy_process_group()
