"""Run TRL's side of the comparison of offline training, in its own environment.

`python -m tests.benchmarks.trl_lesson LESSON FOLDER SEED`

float32, no dropout, no gradient checkpointing, a whole batch at once, the fused AdamW, nothing logged or saved. TRL packs for
SFT alone, and only where there is flash attention; it runs padded here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.benchmarks import lessons
from tests.benchmarks.contender import Clock, Turns
from tests.benchmarks.lessons import LESSONS, Lesson


class TakeTurns(TrainerCallback):
    """Waits for the parent before a step, and sends it the loss and the time afterwards."""

    def __init__(self, turns: Turns):
        self._turns, self._clock = turns, Clock()
        self.loss = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self._turns.reply({})
        self._clock.start()  # while it waits, it uses no CPU

    def on_step_begin(self, args, state, control, **kwargs):
        if not self._turns.wait():
            sys.exit()

    def on_step_end(self, args, state, control, **kwargs):
        self._clock.lap("step")
        self._turns.reply({"times": self._clock.take(), "loss": self.loss})


def _in_order(trainer_class: type) -> type:
    """Takes the records in order, and records each step's loss."""

    class InOrder(trainer_class):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def compute_loss(self, *args, **kwargs) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.take_turns.loss = loss.item()
            return loss

    return InOrder


def trainer(lesson: Lesson, folder: Path, seed: int) -> Any:
    options = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "learning_rate": lesson.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": lessons.OPTIMIZER["weight_decay"],
        "adam_beta1": lessons.OPTIMIZER["betas"][0],
        "adam_beta2": lessons.OPTIMIZER["betas"][1],
        "adam_epsilon": lessons.OPTIMIZER["eps"],
        "max_grad_norm": lessons.MAX_GRAD_NORM,
        "max_steps": lesson.steps,
        "per_device_train_batch_size": lesson.batch,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    records = lessons.records(folder, lesson, seed)
    answers = {"completion": "output"} if lesson is lessons.SFT else {"chosen": "chosen", "rejected": "rejected"}
    columns = {theirs: [record[ours] for record in records] for theirs, ours in {"prompt": "input", **answers}.items()}
    model, data = str(lessons.model_folder(folder, lesson, seed)), Dataset.from_dict(columns)
    if lesson is lessons.SFT:
        return _in_order(SFTTrainer)(model, args=SFTConfig(completion_only_loss=True, **options), train_dataset=data)
    config = DPOConfig(beta=lessons.BETA, disable_dropout=True, **options)
    return _in_order(DPOTrainer)(model, args=config, train_dataset=data)


def main(name: str, folder: str, seed: str) -> None:
    turns = Turns()
    made = trainer(LESSONS[name], Path(folder), int(seed))
    made.take_turns = TakeTurns(turns)
    made.add_callback(made.take_turns)
    made.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
