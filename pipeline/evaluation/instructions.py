"""Tasks whose questions have several instructions each. A metric is the share of all instructions that are followed."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from pipeline.evaluation.questions import Answer, PerQuestion
from pipeline.evaluation.sampled import GenerationTask

SHARES = ("instruction_strict", "instruction_loose")
COUNT = "instructions"


class InstructionTask(GenerationTask):
    """A task of kind `instructions`, with an environment of kind `ifeval`.

    In the shares of instructions, a question weighs as much as it has instructions, so a question's value can be above 1. For
    example, it is 1.5 if 3 of 4 instructions are followed and a question has 2 on average.
    """

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return the metrics of kind `generate`. Shares of instructions are over all instructions of all questions."""
        metrics = super().metrics(answers)
        counts = {id: max(values) for id, values in metrics.get(COUNT, {}).items()}
        mean = sum(counts.values()) / max(1, len(counts))
        for name in SHARES:
            if name in metrics and mean:
                metrics[name] = {id: [value * counts[id] / mean for value in values] for id, values in metrics[name].items()}
        return metrics
