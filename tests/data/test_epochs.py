"""Training data that fill no step, and the records that are left over at the end of the last epoch."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest

from launch.preflight import data_files
from launch.runs.attempts import latest
from launch.runs.run_folder import RunFolder
from launch.runs.run_state import state
from pipeline import config, coordinator
from pipeline.config import DatasetConfig
from pipeline.coordination.run_progress import DROPPED, LEFT_OVER, RunProgress
from pipeline.coordination.training_run import TrainingRun
from pipeline.data import epochs
from pipeline.data.chat import load_tokenizer
from pipeline.data.mixture import build_streams
from pipeline.observe.metrics import read
from pipeline.recipe import user_files
from tests.end_to_end.runs import LOCAL, RECIPE, ROOT
from tests.problems import named, refused

TOO_FEW = ("data", "too-few-records")


def written(path: Path, count: int, bad: int = 0) -> Path:
    rows = [{"input": f"{i}+1=", "output": str(i + 1), "answer": str(i + 1)} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, [*rows, *[{"input": f"{i}+1="} for i in range(bad)]])) + "\n\n")
    return path


def keys(path: Path) -> list[str]:
    return [
        "data.train.dataset_name=null",
        "data.train.kwargs={}",
        "data.train.output_key=output",
        f"data.train.data_path={path}",
    ]


def recipe_of(algorithm: str, path: Path, *overrides: str) -> config.Recipe:
    return config.load(f"tiny_{algorithm}", [*keys(path), f"{algorithm}.max_num_epochs=1", *overrides])


@pytest.mark.parametrize("algorithm", ["sft", "grpo", "ppo", "dapo"])
def test_four_records_do_not_fill_a_step_of_eight(tmp_path, algorithm):
    section = "grpo" if algorithm == "dapo" else algorithm
    batch = "policy.train_global_batch_size" if algorithm == "sft" else f"{section}.num_prompts_per_step"
    recipe = config.load(f"tiny_{algorithm}", [*keys(written(tmp_path / "four.jsonl", 4)), f"{section}.max_num_epochs=1"])
    setattr(recipe.policy if algorithm == "sft" else config.section(recipe), batch.rpartition(".")[2], 8)
    (problem,) = data_files.step_problems(recipe, [])
    assert named([problem]) == {TOO_FEW} and "got 4 records" in problem.message
    assert f"at least 8, the number for one step ({batch})" in problem.message
    config.section(recipe).max_num_epochs = 2
    assert not [*data_files.step_problems(recipe, notes := [])]
    config.section(recipe).max_num_epochs = 10**6  # no limit
    assert not [*data_files.step_problems(recipe, notes)] and len(notes) == 1 and "1 step of 8" in notes[0]


def test_the_dropped_rest_of_the_last_epoch_is_told_before_submission(tmp_path):
    recipe = recipe_of("sft", written(tmp_path / "twenty.jsonl", 20), "policy.train_global_batch_size=8")
    assert not [*data_files.step_problems(recipe, notes := [])]
    assert "2 steps of 8" in notes[0] and "the last 4 records" in notes[0]
    config.section(recipe).max_num_steps = 2  # the run ends before the data do
    assert not [*data_files.step_problems(recipe, notes := [])] and not notes


def test_what_a_data_set_leaves_to_train_on_is_counted(tmp_path):
    path = str(written(tmp_path / "ten.jsonl", 10))
    count = data_files.count
    assert count(DatasetConfig(data_path=path)) == 10
    assert count(DatasetConfig(data_path=path, max_samples=6, repeat=3)) == 18
    assert count(DatasetConfig(data_path=path, split_validation_size=0.25)) == 7
    assert count(DatasetConfig(data_path=path, split_validation_size=4, repeat=2)) == 12
    assert count(DatasetConfig(dataset_name="scratchpad_addition", kwargs={"size": 5})) == 5
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.parquet").write_bytes(b"PAR1\n" * 3)  # another check refuses it
    for unknown in (tmp_path / "pipe", tmp_path / "absent.jsonl", tmp_path / "a.parquet", Path("/dev/zero")):
        assert count(DatasetConfig(data_path=str(unknown))) is None
    assert count(DatasetConfig(dataset_name="openai/gsm8k")) is None


def test_two_small_sets_fill_a_step_together(tmp_path):
    four = written(tmp_path / "four.jsonl", 4)
    sets = ["data.train=null", *(f"data.datasets.{name}.data_path={four}" for name in "ab")]
    recipe = config.load("tiny_sft", [*sets, "sft.max_num_epochs=1", "policy.train_global_batch_size=9"])
    assert named(data_files.step_problems(recipe, [])) == {TOO_FEW}
    recipe.policy.train_global_batch_size = 8
    assert not [*data_files.step_problems(recipe, [])]
    stream, _ = build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))
    assert stream.usable == 8


def test_dropped_records_do_not_count(tmp_path):
    recipe = recipe_of(
        "sft", written(tmp_path / "data.jsonl", 4, bad=8), "policy.train_global_batch_size=8", "data.bad_records=drop"
    )
    stream, _ = build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))
    problem = epochs.of_records(recipe, stream.usable).problem()
    assert problem and named([problem]) == {TOO_FEW} and "got 4 records" in problem.message


class Run:
    """The parts of a run that the offline loop uses, without ranks."""

    def __init__(self, recipe: config.Recipe, data, resumed_at: int = 0):
        parts = SimpleNamespace
        self.logged: list[dict[str, float]] = []
        clocks = {"clock": lambda _: contextlib.nullcontext(), "take_clocks": lambda: {"time/step": 1.0}, "close": lambda: None}
        nothing = dict.fromkeys(("train", "data_ranks", "colocation", "checkpoints", "attempt", "saver", "teacher_samples"))
        self.run = TrainingRun(
            **nothing,
            recipe=recipe,
            timeline=parts(step_ended=lambda _: {}),
            startup=parts(enter=lambda _: None),
            steering=parts(step_ended=lambda *_: {}),
            logger=parts(metrics=parts(**clocks)),
            progress=RunProgress(recipe, parts(why_leave=lambda: None), None, None),
        )
        self.run.data = data
        self.run.restore = lambda _: (resumed_at, self.run.logger.metrics)
        self.run.finish = lambda _: None
        self.run.log_and_save = lambda step, last, position, values, groups: self.logged.append(values | {"last": last})
        with mock.patch.object(coordinator, "learn", lambda *_: {}):
            self.step = coordinator.run_offline(self.run, parts(sequences_per_item=1), data, [])


class Items:
    """A stream of examples that ends."""

    dropped = 0
    metrics: ClassVar[dict[str, float]] = {}

    def __init__(self, count: int):
        self._left = [SimpleNamespace(tokens=[1, 2])] * count

    def take(self, n: int) -> list:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def state_dict(self) -> dict:
        return {}


def test_a_run_that_makes_no_step_is_an_error_and_the_rest_of_an_epoch_is_told_once(tmp_path, caplog):
    recipe = recipe_of("sft", tmp_path / "absent", "policy.train_global_batch_size=8", "sft.max_num_steps=5")
    with refused(TOO_FEW):
        Run(recipe, Items(4))
    caplog.set_level("INFO", "pipeline")
    ended = Run(recipe, Items(20))
    assert ended.step == 2 and [line.get(LEFT_OVER) for line in ended.logged] == [None, 4.0] and ended.logged[-1]["last"]
    assert "the last 4 records" in caplog.text
    assert [LEFT_OVER in line for line in Run(recipe, Items(43)).logged] == [False] * 5  # max_num_steps ends it
    assert [LEFT_OVER in line for line in Run(recipe, Items(16)).logged] == [False] * 2


NOT_RECORDS = (
    b'{"input": \n',
    b'{"input": "\xff"}\n',
    b"[1]\n",
    b"[" * 100_000 + b"\n",
    b'{"input": "1", "output": "' + b"x" * 2000 + b'"}\n',
)


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr(user_files, "MAX_LINE", 1000)


def mixed(path: Path, first: bytes = b"") -> Path:
    """Write 12 records with a line that is none after every second one."""
    good = [json.dumps({"input": f"{i}+1=", "output": str(i + 1)}).encode() + b"\n" for i in range(12)]
    bad = [*NOT_RECORDS, NOT_RECORDS[0]]
    path.write_bytes(first + b"\n".join(good[2 * i] + good[2 * i + 1] + bad[i] for i in range(6)))
    return path


@pytest.mark.parametrize("first", [b"", NOT_RECORDS[0], NOT_RECORDS[4]], ids=["record", "no JSON", "overlong"])
def test_lines_that_are_no_records_are_dropped_and_counted_also_in_a_resumed_run(tmp_path, monkeypatch, short_lines, first):
    """The check at the start sees some of them, the steps the others; the count is that of the lines before submission."""
    monkeypatch.setattr("pipeline.data.stream.CHECKED_AT_START", 4)
    path, of_first = mixed(tmp_path / "data.jsonl", first), bool(first)
    drop = ("policy.train_global_batch_size=3", "data.bad_records=drop", "sft.max_num_epochs=2", "sft.max_num_steps=100")
    recipe = recipe_of("sft", path, *drop)
    assert data_files.count(recipe.data.train) == 18 + of_first

    def stream():
        return build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))[0]

    whole, data = stream(), stream()
    assert data.records == 18 + of_first
    run = Run(recipe, data)
    dropped = [line.get(DROPPED, 0) for line in run.logged]
    assert run.step == 8 and dropped == sorted(dropped) and dropped[-1] == 2 * (6 + of_first) and dropped[0] < 4
    items, resumed = [], whole
    while taken := resumed.take(3):
        items += taken
        state, resumed = json.loads(json.dumps(resumed.state_dict())), stream()
        resumed.load_state_dict(state)
    assert resumed.dropped == 2 * (6 + of_first)
    every = stream().take(100)
    assert [item.tokens.tolist() for item in items] == [item.tokens.tolist() for item in every] and len(every) == 24


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_prompts_pairs_and_validation_drop_lines_that_are_no_records(tmp_path, algorithm):
    row = {"input": "1+1=", "output": "2", "answer": "2", "chosen": "2", "rejected": "3", "margin": 1}
    path = tmp_path / "data.jsonl"
    path.write_bytes(NOT_RECORDS[0] + (json.dumps(row) + "\n").encode() * 3 + NOT_RECORDS[1])
    validation = [f"data.validation.data_path={path}", "data.validation.dataset_name=null", "data.validation.output_key=output"]
    model = [f"policy.model_name={config.RECIPES / 'tiny'}", "policy.random_init=true", "needs=[]"]
    overrides = [*validation, *model, f"{algorithm}.max_num_epochs=1", "data.bad_records=drop"]
    recipe = config.load(f"tiny_{algorithm}", [*keys(path), *overrides])
    train, validated = build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))
    assert (len(train.take(9)), train.dropped, len(validated)) == (3, 2, 3)
    recipe.data.bad_records = "error"
    with pytest.raises(ValueError, match=r"data.jsonl:1: not JSON"):
        build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))


def test_a_resumed_run_with_nothing_left_is_done(tmp_path):
    recipe = recipe_of("sft", tmp_path / "absent", "policy.train_global_batch_size=8", "sft.max_num_steps=5")
    assert Run(recipe, Items(4), resumed_at=2).step == 2


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm", "grpo"])
def test_no_job_without_a_step_is_done(tmp_path, algorithm):
    """The check before submission counts lines; the job drops those that its tokenizer finds too long."""
    rows = [
        {"input": f"{i}+1=", "output": str(i + 1), "answer": str(i + 1), "chosen": "1", "rejected": "2", "margin": 1}
        for i in range(3)
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *[{**rows[0], "input": "1+" * 200 + "1="}] * 150]))
    recipe = RECIPE if algorithm == "grpo" else f"tiny_{algorithm}"
    overrides = [*keys(path), f"{algorithm}.max_num_epochs=1", "data.overlong_prompts=drop", *LOCAL]
    if algorithm in ("dpo", "rm"):
        overrides += ["needs=[]", f"policy.model_name={config.RECIPES / 'tiny'}", "policy.random_init=true"]
    run = subprocess.run(
        [sys.executable, "launch/submit.py", f"recipe={recipe}", f"run_dir={tmp_path / 'run'}", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1 and not (tmp_path / "run/done.json").exists(), run.stdout + run.stderr
    assert "got 3 records" in latest(tmp_path / "run").failure["message"]
    assert state(RunFolder.at(tmp_path / "run")).name == "failed" and not read(tmp_path / "run/metrics.jsonl")
