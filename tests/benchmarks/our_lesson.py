"""Our side of the comparison of offline training: `python -m tests.benchmarks.our_lesson LESSON FOLDER SEED BACKEND`.

The data stream, the packing, the algorithm and the train backend are the pipeline's; one rank, so that there is nothing to send.
After its steps it writes what it has learnt to FOLDER/LESSON-SEED-BACKEND: the next lesson begins with it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch.distributed as dist

from pipeline import algorithms, train
from pipeline.config import DatasetConfig, Recipe
from pipeline.data import build_streams
from pipeline.data.batches import share
from pipeline.data.chat import load_tokenizer
from pipeline.data.packing import pack
from pipeline.train.base import Use
from pipeline.train.export import export
from pipeline.types import DataPlace, Outputs, PackedBatch
from tests.benchmarks import lessons
from tests.benchmarks.contender import Clock, Turns
from tests.benchmarks.lessons import LESSONS, Lesson
from tests.benchmarks.our_step import join_alone


def recipe(lesson: Lesson, folder: Path, seed: int, backend: str) -> Recipe:
    from pipeline.config import load

    data = {"data_path": str(lessons.records_file(folder, lesson, seed))}
    return load_recipe(lesson, folder, seed, backend, DatasetConfig(**data))
