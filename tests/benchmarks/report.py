"""The tables: every contender's step by phase, and how they compare."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from tests.benchmarks.cases import Case
from tests.benchmarks.contender import Times
from tests.benchmarks.floor import Floor

GENERATE = ("decode", "reward", "generate")  # phases that make rollouts; refit stands alone; the others train
REFIT = "refit"
CPU, WALL = 0, 1


@dataclass
class Measured:
    """A contender's steps, after the warm-up."""

    name: str
    times: list[Times] = field(default_factory=list)

    def part(self, phases: list[str], clock: int) -> list[float]:
        """Seconds of those phases together, by step."""
        return [sum(times[phase][clock] for phase in phases) for times in self.times]

    @property
    def phases(self) -> list[str]:
        return list(self.times[0])

    def median(self, clock: int) -> float:
        return statistics.median(self.part(self.phases, clock))


def print_case(case: Case, floor: Floor, measured: list[Measured]) -> None:
    """TRL first, ours after it."""
    completion_tokens = case.tokens[1]
    print(
        f"\n{case.name}: {case.parameters / 1e6:.2f}M parameters, float32, {case.prompts} prompts x {case.generations};"
        f" prompts of {case.prompt_length} tokens, completions of {completion_tokens / case.samples:.1f} on average and at most"
        f" {case.lengths().max()}, {completion_tokens} in all. One thread. {len(measured[0].times)} steps, in turns, after"
        f" {case.warmup} for warming up."
    )
    print(f"{'seconds a step':42s} {'CPU min':>9s} {'median':>9s} {'wall min':>9s} {'median':>9s}")
    for contender in measured:
        generating = [phase for phase in contender.phases if phase in GENERATE]
        training = [phase for phase in contender.phases if phase not in GENERATE and phase != REFIT]
        _row(contender.name, contender, contender.phases)
        for title, phases in (("rollout", generating), ("train", training), (REFIT, [REFIT])):
            if phases[0] in contender.phases:
                _row(f"  {title}", contender, phases)
                for phase in phases if len(phases) > 1 else ():
                    _row(f"    {phase}", contender, [phase])
    print(
        f"{'matmul floor':42s} {floor.generate + floor.train:9.3f}\n"
        f"{'  rollout':42s} {floor.generate:9.3f}   {floor.generate_flops / 1e9:.1f} GFLOP at {floor.generate_rate / 1e9:.0f}"
        f" GFLOP/s\n"
        f"{'  train':42s} {floor.train:9.3f}   {floor.train_flops / 1e9:.1f} GFLOP at {floor.train_rate / 1e9:.0f} GFLOP/s"
    )
    trl = measured[0]
    for contender in measured:
        cpu, wall = contender.median(CPU), contender.median(WALL)
        print(
            f"{contender.name}: {case.samples / cpu:.1f} samples and {completion_tokens / cpu:.0f} completion tokens per CPU s;"
            f" {trl.median(CPU) / cpu:.2f} times TRL's speed in CPU s, {trl.median(WALL) / wall:.2f} times in wall s"
        )


def _row(title: str, contender: Measured, phases: list[str]) -> None:
    cpu, wall = contender.part(phases, CPU), contender.part(phases, WALL)
    print(f"{title:42s} {min(cpu):9.3f} {statistics.median(cpu):9.3f} {min(wall):9.3f} {statistics.median(wall):9.3f}")
