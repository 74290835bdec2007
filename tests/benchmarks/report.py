"""Print the tables: every contender's step by phase, and the comparison."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from tests.benchmarks.cases import Case, padded_microbatches, padded_tokens
from tests.benchmarks.contender import Times
from tests.benchmarks.floor import Floor

GENERATE = ("decode", "environment", "generate")  # phases that make rollouts; refit stands alone; the others train
REFIT = "refit"
CPU, WALL = 0, 1


@dataclass
class MeasuredRun:
    """A contender's steps, after the warm-up."""

    name: str
    times: list[Times] = field(default_factory=list)

    def part(self, phases: list[str], clock: int) -> list[float]:
        """Return seconds of those phases together, by step."""
        return [sum(times[phase][clock] for phase in phases) for times in self.times]

    @property
    def phases(self) -> list[str]:
        return list(self.times[0])

    def median(self, clock: int) -> float:
        return statistics.median(self.part(self.phases, clock))


def print_case(case: Case, floor: Floor, measured: list[MeasuredRun]) -> None:
    """Sort TRL first, ours after it."""
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


def print_backends(
    case: Case, fsdp_packed: MeasuredRun, fsdp_padded: MeasuredRun, megatron_packed: MeasuredRun, megatron_padded: MeasuredRun
) -> None:
    lengths = (case.prompt_length + case.lengths()).tolist()
    real = sum(lengths)
    dealt, by_length = (padded_tokens(x, padded_microbatches(x, case.packed_tokens)) / real for x in (lengths, sorted(lengths)))
    phases = fsdp_packed.phases
    print(
        f"\n{case.name}: {case.parameters / 1e6:.2f}M parameters, float32, {case.samples} sequences of random tokens, {real} in"
        f" all, {real / case.samples:.0f} on average and at most {max(lengths)}; microbatches of at most {case.packed_tokens}."
        f" Padding in the order they come makes {dealt:.2f} times as many tokens of them (sorted by length it would be"
        f" {by_length:.2f}). One rank, one thread. {len(fsdp_packed.times)} steps, in turns, after {case.warmup} for warming"
        " up; losses and gradient norms agree."
    )
    titles = [*(f"{phase:>23s}" for phase in phases), f"{'ms a token':>12s}{'tokens per s':>14s}"]
    print(f"{'CPU seconds a step':24s}{'min':>8s}{'median':>8s}" + "".join(titles))
    for contender in (fsdp_packed, fsdp_padded, megatron_packed, megatron_padded):
        median = contender.median(CPU)
        parts = "".join(f"{statistics.median(contender.part([phase], CPU)):23.3f}" for phase in phases)
        whole = f"{contender.name:24s}{min(contender.part(phases, CPU)):8.3f}{median:8.3f}"
        print(f"{whole}{parts}{1000 * median / real:12.3f}{real / median:14.0f}")
    print(f"ratios of medians, by python -m tests.benchmarks backends {case.name} (tokens are real ones, not padding):")
    _ratio("padded / packed, FSDP2", fsdp_padded, fsdp_packed)
    _ratio("padded / packed, Megatron-Core", megatron_padded, megatron_packed)
    _ratio("Megatron-Core / FSDP2, packed", megatron_packed, fsdp_packed)
    _ratio("Megatron-Core / FSDP2, padded", megatron_padded, fsdp_padded)


def _ratio(title: str, one: MeasuredRun, other: MeasuredRun) -> None:
    by_phase = []
    for phase in one.phases:
        ours, theirs = (statistics.median(contender.part([phase], CPU)) for contender in (one, other))
        by_phase.append(f"{phase} {ours / theirs:.2f} ({ours - theirs:+.3f} s)")
    print(f"  {title:32s}{one.median(CPU) / other.median(CPU):5.2f}   {'; '.join(by_phase)}")


def _row(title: str, contender: MeasuredRun, phases: list[str]) -> None:
    cpu, wall = contender.part(phases, CPU), contender.part(phases, WALL)
    print(f"{title:42s} {min(cpu):9.3f} {statistics.median(cpu):9.3f} {min(wall):9.3f} {statistics.median(wall):9.3f}")
