"""Tasks of several instructions in each question: also the share of all instructions that are followed."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from pipeline.evaluation.questions import Answer, PerQuestion
from pipeline.evaluation.sampled import GenerationTask

SHARES = ("instruction_strict", "instruction_loose")
COUNT = "instructions"


class InstructionTask(GenerationTask):
    """A task of kind `instructions`, with an environment of kind `ifeval`.

    A question counts as often as it has instructions in the shares of instructions, whose values can be above 1 therefore: a
    question with 3 of 4 followed, where there are 2 on average, has 1.5.
    """

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return the metrics of kind `generate`, with shares over all instructions."""
        metrics = super().metrics(answers)
        counts = {id: max(values) for id, values in metrics.get(COUNT, {}).items()}
        mean = sum(counts.values()) / max(1, len(counts))
        for name in SHARES:
            if name in metrics and mean:
                metrics[name] = {id: [value * counts[id] / mean for value in values] for id, values in metrics[name].items()}
        return metrics
