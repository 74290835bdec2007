"""The cases of the comparison of offline training: SFT and DPO on scratchpad addition, by ours and by TRL.

Of each seed all start from the same weights and see the same records in the same order, in batches of the same size, with the
same AdamW: what sets their curves apart is arithmetic. A seed is of weights and of data. SFT starts from random weights, DPO
from what our SFT has made of those of the same seed. At SFT's rate the last bits of float32 grow into differences that can be
seen, between our two backends as much as from TRL; at DPO's they do not.

Imported in TRL's environment too, so nothing of the pipeline is used here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SEEDS = (0, 1, 2)
LAST = 10  # steps whose mean loss is the final one
BETA = 0.1


@dataclass(frozen=True)
class Lesson:
    name: str  # sft, dpo
    steps: int
    batch: int  # examples, or pairs
    lr: float


SFT = Lesson("sft", steps=120, batch=64, lr=2e-3)
DPO = Lesson("dpo", steps=60, batch=32, lr=5e-5)
LESSONS = {lesson.name: lesson for lesson in (SFT, DPO)}
OPTIMIZER = {"weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8}
MAX_GRAD_NORM = 1.0
DIGITS = (1, 2)


def model_folder(folder: Path, lesson: Lesson, seed: int) -> Path:
    """Write the initial checkpoint of both sides."""
    return folder / f"{lesson.name}-{seed}"


def records_file(folder: Path, lesson: Lesson, seed: int) -> Path:
    """Write JSONL, one record a line, in training order."""
    return folder / f"{lesson.name}-{seed}.jsonl"


def records(folder: Path, lesson: Lesson, seed: int) -> list[dict[str, str]]:
    return [json.loads(line) for line in records_file(folder, lesson, seed).read_text().splitlines()]
