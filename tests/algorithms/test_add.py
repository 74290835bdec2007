"""Adding an algorithm takes one new file and one line in the registry: a copy of the code then checks its keys and trains."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = '''"""Focal fine-tuning (https://arxiv.org/abs/1708.02002 eq. 4): tokens that are likely already count less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.algorithms.base import Algorithm
from pipeline.algorithms.sections import OfflineConfig
from pipeline.problems import Problem
from pipeline.values import Float

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


@dataclass
class FocalConfig(OfflineConfig):
    """Focal fine-tuning."""

    gamma: Annotated[Float, Field(ge=0, description="How much less likely tokens count. 0: SFT.")] = 2.0


class Focal(Algorithm):
    Section = FocalConfig

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.reductions import masked_share
        from pipeline.types import LossOutput

        weights = (1 - outputs.logprobs.detach().exp()) ** self.section.gamma
        metrics = {"weight": masked_share(weights, batch, counts)}
        return LossOutput(masked_share(-weights * outputs.logprobs, batch, counts), metrics)

    def problems(self) -> Iterator[Problem]:
        if self.section.gamma == 0:
            yield Problem("focal.gamma", "has-no-effect", "got 0; expected above 0. Try algorithm=sft")
'''
LINE = '    "focal": "Focal",\n'


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for part in ("pipeline", "launch", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pipeline/algorithms/focal.py").write_text(FILE)
    registry, last = folder / "pipeline/algorithms/__init__.py", '    "rm": "RM",\n'
    assert registry.read_text().count(last) == 1
    registry.write_text(registry.read_text().replace(last, last + LINE))
    return folder


def submit(copy: Path, *overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "launch/submit.py", "recipe=tiny_sft", "algorithm=focal", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=300)


def test_its_keys_are_checked(copy):
    done = submit(copy, "focal.gamma=0")
    assert done.returncode != 0 and "focal.gamma: got 0" in done.stderr and "[has-no-effect]" in done.stderr


def test_it_trains(copy, tmp_path):
    done = submit(
        copy,
        f"run_dir={tmp_path}",
        "cluster.executor=local",
        "cluster.train.ranks_per_node=1",
        "checkpointing.enabled=false",
        "policy.train_global_batch_size=8",
        "policy.scheduler=null",
        "data.train.kwargs={size: 64, digits: [1, 2]}",
        "data.validation=null",
        "focal.val_at_end=false",
        "focal.max_num_steps=2",
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert second["train/loss"] < first["train/loss"] and 0 < second["train/weight"] < first["train/weight"] < 1
