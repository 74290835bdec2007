"""Our side of the comparison of offline training: `python -m tests.benchmarks.our_lesson LESSON FOLDER SEED BACKEND`.

Data stream, packing, algorithm and train backend (fsdp, megatron) are the pipeline's, of recipes tiny_sft and tiny_dpo, on one
rank, so that there is nothing to send. At the end it writes what it has learnt to FOLDER/LESSON-SEED-BACKEND.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

from pipeline import algorithms, config, train
from pipeline.data.batches import split_batch
from pipeline.data.chat import load_tokenizer
from pipeline.data.mixture import build_streams
from pipeline.data.packing import pack
from pipeline.train.hf_export import export
from pipeline.train.train_backend import ModelRole
from pipeline.types import DataParallelRank
from tests.benchmarks import lessons
from tests.benchmarks.contender import Clock, Turns
from tests.benchmarks.lessons import LESSONS, Lesson
from tests.benchmarks.our_step import join_alone


class OurLesson:
    def __init__(self, lesson: Lesson, folder: Path, seed: int, backend: str):
        self.recipe = _recipe(lesson, folder, seed, backend)
        self._examples, _ = build_streams(self.recipe, load_tokenizer(self.recipe.policy.tokenizer))
        self._algorithm = algorithms.build(self.recipe)
        self.backend = train.build(
            self.recipe.policy, dist.group.WORLD, seed, ModelRole(reference=self._algorithm.needs.reference)
        )

    def step(self) -> float:
        """Take a step and return the loss."""
        size, needs = self.recipe.policy.train_global_batch_size, self._algorithm.needs
        items = self._examples.take(size)
        samples = [sample for item in items for sample in (item if isinstance(item, tuple) else (item,))]
        ((update,),) = split_batch(
            samples, self.recipe.policy, [DataParallelRank(0, 1)], size, self._algorithm.sequences_per_item
        )
        batches = [pack([update.samples[i] for i in members], self.backend.device) for members in update.train]
        if needs.reference:
            outputs = self.backend.forward(batches, "reference")
            batches = [
                dataclasses.replace(batch, reference_logprobs=output.logprobs)
                for batch, output in zip(batches, outputs, strict=True)
            ]
        loss = self._algorithm.losses["policy"]
        result = self.backend.step(batches, lambda outputs, batch: loss(outputs, batch, update.counts))
        return result.metrics["loss"]


def _recipe(lesson: Lesson, folder: Path, seed: int, backend: str) -> config.Recipe:
    overrides = {
        f"{lesson.name}.val_at_start": False,
        f"{lesson.name}.val_at_end": False,
        "policy.model_name": str(lessons.model_folder(folder, lesson, seed)),
        "policy.random_init": False,
        "policy.train_global_batch_size": lesson.batch,
        "policy.scheduler": None,
        "policy.max_grad_norm": lessons.MAX_GRAD_NORM,
        "policy.optimizer.kwargs": {"lr": lesson.lr, **lessons.OPTIMIZER},
        "policy.dtensor_cfg.enabled": backend == "fsdp",
        "policy.megatron_cfg.enabled": backend == "megatron",
        "data.shuffle": False,
        "data.validation": None,
        "data.train.dataset_name": None,
        "data.train.data_path": str(lessons.records_file(folder, lesson, seed)),
        "cluster.train.ranks_per_node": 1,
    }
    if lesson is lessons.DPO:
        overrides |= {"dpo.reference_policy_kl_penalty": lessons.BETA, "dpo.sft_loss_weight": 0}
    return config.load(f"tiny_{lesson.name}", [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


def main(name: str, folder: str, seed: str, backend: str) -> None:
    turns, clock = Turns(), Clock()
    join_alone()
    ours = OurLesson(LESSONS[name], Path(folder), int(seed), backend)
    turns.reply({})
    clock.start()  # while it waits, it uses no CPU
    while turns.wait():
        loss = ours.step()
        clock.lap("step")
        turns.reply({"times": clock.take(), "loss": loss})
    export(ours.backend, ours.recipe.policy, Path(folder) / f"{name}-{seed}-{backend}", writes=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
