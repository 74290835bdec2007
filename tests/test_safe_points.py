"""Checkpoints of a run that leaves between two steps: `TrainingRun` over real checkpoints, without ranks."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.algorithms.sft import SFTConfig
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig, ClusterConfig, LoggerConfig
from pipeline.coordination.colocation import Colocation
from pipeline.coordination.run_logger import RunLogger
from pipeline.coordination.run_progress import NothingSaved, RunProgress
from pipeline.coordination.run_saver import RunSaver
from pipeline.coordination.training_run import TrainingRun
from pipeline.files.storage import NO_RETRIES
from pipeline.job.attempt import Attempt, Superseded
from pipeline.job.deadline import Deadline
from pipeline.job.startup import Startup
from pipeline.observe.metrics import Metrics, read
from pipeline.steering.live_changes import Steering
from tests.fake_group import FakeGroup

POSITION = {"epoch": 0, "index": 8}


class Ranks(FakeGroup):
    """The train realm, reduced to the time that its saves take."""

    def __init__(self):
        self.folders: list[str] = []
        self.slow = False  # an asynchronous save is complete only after a wait

    def save(self, folder: str):
        self.folders.append(Path(folder).name)
        (Path(folder) / "weights").write_text("1")
        return SimpleNamespace(result=lambda: [None])

    def written(self, wait: bool):
        return SimpleNamespace(result=lambda: [{} if wait or not self.slow else None])


class Steps:
    """Return rank 0's run between steps."""

    def __init__(self, run_dir: Path, logging: dict | None = None, **checkpointing):
        self.signals: list[str] = []
        self.attempt = Attempt(run_dir / "attempts/17-0")
        self.attempt.folder.mkdir(parents=True)
        self.attempt.claim()
        self.ranks = Ranks()
        config = CheckpointingConfig(**{"async_save": False, "save_period": 10, **checkpointing})
        self.checkpoints = Checkpoints(run_dir, self.attempt.name, config)
        self.deadline = Deadline(0.0, {}, [], lambda: self.signals)
        self.recipe = recipe = SimpleNamespace(
            checkpointing=config,
            cluster=ClusterConfig(),
            algorithm="sft",
            sft=SFTConfig(),
            logger=LoggerConfig(tensorboard_enabled=False, **(logging or {})),
        )
        colocation = Colocation(False, self.ranks, None, None)
        self.logger = RunLogger(recipe, run_dir, NO_RETRIES, None, None)
        self.logger.open(None)
        self.saver = RunSaver(config, self.checkpoints, self.ranks, colocation, self.attempt, self.deadline, self.logger)
        self.run = TrainingRun(
            recipe=recipe,
            train=self.ranks,
            data_ranks=[],
            colocation=colocation,
            checkpoints=self.checkpoints,
            attempt=self.attempt,
            timeline=None,
            startup=Startup(),
            steering=Steering(recipe, run_dir, self.ranks, NO_RETRIES),
            logger=self.logger,
            saver=self.saver,
            progress=RunProgress(recipe, self.deadline, self.attempt, self.saver),
            teacher_samples=None,
        )
        self.lines = run_dir / "metrics.jsonl"

    def end(self, step: int, last: bool = False, groups: list | None = None) -> None:
        self.run.log_and_save(step, last, POSITION, {"time/step": 1.0, "train/loss": step / 2}, groups)

    def left_behind(self, name: str) -> str | None:
        path = self.attempt.folder / name
        return path.read_text().strip() if path.exists() else None


def test_a_run_that_leaves_saves_its_step(tmp_path):
    steps = Steps(tmp_path)
    steps.end(1)
    assert not steps.run.progress.must_leave() and steps.checkpoints.latest() is None
    steps.end(2)
    steps.signals.append("SIGUSR2")
    assert steps.run.progress.must_leave()
    latest = steps.checkpoints.latest()
    assert (latest.step, latest.state) == (
        2,
        {"stream": POSITION, "early_stop": steps.run.progress.early_stop.state_dict(), "steer": []},
    )
    assert steps.left_behind("requeue") == steps.run.progress.left == "SIGUSR2 came"
    assert steps.left_behind("progress") == "2"


def test_not_twice(tmp_path):
    steps = Steps(tmp_path, save_period=2)
    for step in (1, 2):
        steps.end(step)
    steps.signals.append("SIGTERM")
    assert steps.run.progress.must_leave()
    assert len(steps.ranks.folders) == 1


@pytest.mark.parametrize("last", [False, True])
def test_the_end_saves_the_last_step_if_it_is_not_saved_yet(tmp_path, last):
    """Data may end while the next step is filled, when the step before has already been treated as not the last."""
    steps = Steps(tmp_path)
    for step in (1, 2):
        steps.end(step, last=last and step == 2)
    steps.run.finish(2)
    assert steps.checkpoints.latest().step == 2 and len(steps.ranks.folders) == 1


def test_before_the_first_step_there_is_nothing_to_save(tmp_path):
    steps = Steps(tmp_path)
    steps.signals.append("SIGTERM")
    assert steps.run.progress.must_leave()
    assert steps.left_behind("requeue") == "SIGTERM came"
    assert steps.left_behind("progress") is None and steps.ranks.folders == []


@pytest.mark.parametrize("saved_at", [2, 3])  # on schedule: one step ago, or just now
def test_an_asynchronous_save_is_waited_for(tmp_path, saved_at):
    steps = Steps(tmp_path, save_period=saved_at, async_save=True)
    steps.ranks.slow = True
    for step in (1, 2, 3):
        steps.end(step)
    assert steps.checkpoints.latest() is None and steps.left_behind("progress") is None
    steps.signals.append("SIGUSR2")
    assert steps.run.progress.must_leave()
    assert steps.checkpoints.latest().step == 3
    assert steps.left_behind("progress") == "3"
    assert len(steps.ranks.folders) == (2 if saved_at == 2 else 1)


def test_without_checkpoints_nothing_is_saved_and_the_run_does_not_continue(tmp_path):
    steps = Steps(tmp_path, enabled=False)
    steps.end(1, last=False)
    steps.signals.append("SIGUSR2")
    with pytest.raises(NothingSaved, match="SIGUSR2 came: the run ends without having saved"):
        steps.run.progress.must_leave()
    assert steps.left_behind("requeue") is None and steps.ranks.folders == []


def test_the_duration_of_a_save_is_in_the_next_line(tmp_path):
    steps = Steps(tmp_path, save_period=1)
    for step in (1, 2, 3):
        steps.end(step)
    first, *others = read(steps.lines)
    assert "time/save" not in first
    assert all(0 < line["time/save"] < 60 for line in others)


def test_a_superseded_attempt_writes_neither_metrics_nor_a_checkpoint(tmp_path):
    steps = Steps(tmp_path, async_save=True)
    steps.end(1)
    steps.ranks.slow = True
    steps.saver.save(1, POSITION, {})
    later = Attempt(tmp_path / "attempts/17-1")
    later.folder.mkdir()
    later.claim()
    with pytest.raises(Superseded):
        steps.end(2)
    with pytest.raises(Superseded):
        steps.saver.settle(wait=True)
    assert [line["step"] for line in read(steps.lines)] == [1]
    assert steps.checkpoints.all() == [] and steps.left_behind("progress") is None
    other = Steps(tmp_path / "other")
    other.end(1)
    Attempt(tmp_path / "other/attempts/17-1").folder.mkdir()
    Attempt(tmp_path / "other/attempts/17-1").claim()
    with pytest.raises(Superseded):
        other.saver.save(1, POSITION, {})
    assert other.ranks.folders == []


def test_a_checkpoint_keeps_the_rollouts_that_no_step_has_trained_on(tmp_path):
    steps = Steps(tmp_path, save_period=1)
    steps.saver.rollouts = lambda: b"" if steps.checkpoints.latest() else b"groups"
    steps.end(1)
    assert steps.checkpoints.latest().rollouts() == b"groups"
    steps.end(2)
    latest = steps.checkpoints.latest()
    assert latest.step == 2 and latest.rollouts() == b""
    assert not (latest.folder / "buffer.msgpack").exists()


class Slow:
    """Metrics that write rollouts only once the test allows it."""

    logs_rollouts = True

    def __init__(self, of_steps: Metrics):
        self.log, self.close, self.written, self.may = of_steps.log, of_steps.close, [], threading.Event()

    def log_rollouts(self, step, groups, tokenizer, kind):
        assert self.may.wait(30)
        if not groups:
            raise ValueError("nothing to write")
        self.written.append((kind, step))


def test_rollouts_are_written_asynchronously_and_before_the_checkpoint_that_counts_them(tmp_path):
    steps = Steps(tmp_path, save_period=2)
    steps.logger.metrics = slow = Slow(steps.logger.metrics)
    steps.end(1, groups=["a group"])
    assert not slow.written and [line["step"] for line in read(steps.lines)] == [1]
    slow.may.set()
    at_commit, commit = [], steps.checkpoints.commit

    def noting(*arguments):
        at_commit.extend(slow.written)
        return commit(*arguments)

    steps.checkpoints.commit = noting
    steps.end(2, groups=["a group"])
    assert at_commit == [("step", 1), ("step", 2)] and steps.checkpoints.latest().step == 2


def test_waiting_for_rollouts_has_its_own_phase_and_is_not_part_of_a_saves_duration(tmp_path, monkeypatch):
    steps = Steps(tmp_path, save_period=1)
    steps.logger.metrics = slow = Slow(steps.logger.metrics)
    phases, saves = [], []

    @contextlib.contextmanager
    def phase(name):
        begun = time.monotonic()
        yield
        phases.append((name, time.monotonic() - begun > 0.3))

    steps.logger._phase = phase
    monkeypatch.setattr(steps.deadline, "record_save", saves.append)
    threading.Timer(0.5, slow.may.set).start()
    steps.end(1, groups=["a group"])
    assert phases == [("write rollouts", False), ("write rollouts", True)] and slow.written
    assert 0 < saves[0] < 0.4 and steps.saver._save_s == saves[0]


def test_rollouts_that_are_never_written_end_the_run_with_its_phase(tmp_path):
    steps = Steps(tmp_path, save_period=1)
    steps.logger.metrics = slow = Slow(steps.logger.metrics)
    steps.recipe.cluster.timeouts.save = 0.2
    with pytest.raises(
        TimeoutError, match=r"verb 'coordinate', phase 'write rollouts': not done after 0\.2 s \(cluster\.timeou"
    ):
        steps.end(1, groups=["a group"])
    assert steps.checkpoints.latest() is None
    slow.may.set()


def test_no_tokenizer_is_copied_if_no_rollouts_are_logged(tmp_path, monkeypatch):
    steps = Steps(tmp_path, logging={"num_rollouts_to_log": 0})
    monkeypatch.setattr("pipeline.coordination.run_logger.copy.deepcopy", lambda _: pytest.fail("the tokenizer was copied"))
    steps.end(1, groups=["a group"])
    steps.run.finish(2)
    assert not (tmp_path / "rollouts").exists()


def test_an_error_in_writing_rollouts_ends_the_run_and_commits_nothing(tmp_path):
    steps = Steps(tmp_path, save_period=2)
    steps.logger.metrics = slow = Slow(steps.logger.metrics)
    slow.may.set()
    steps.end(1, groups=["a group"])
    with pytest.raises(ValueError, match="nothing to write"):
        steps.end(2, groups=[])
    assert steps.checkpoints.latest() is None
    with pytest.raises(ValueError, match="nothing to write"):
        steps.run.finish(2)


def test_a_metric_that_a_checkpoint_lacks_is_logged_once(tmp_path, caplog):
    steps = Steps(tmp_path, save_period=1, metric_name="train:lss")
    steps.end(1)
    steps.end(2)
    (warning,) = [record.getMessage() for record in caplog.records if "metric_name" in record.getMessage()]
    assert "got train:lss, but the metrics of step 1 have no train/lss" in warning
    assert warning.endswith("Its metrics: time/step, train/loss")


def test_a_step_without_validation_is_named_as_the_reason(tmp_path, caplog):
    steps = Steps(tmp_path, save_period=1, metric_name="val:accuracy")
    steps.end(1)
    assert "step 1, which was not validated, have no val/accuracy" in caplog.text


@pytest.mark.parametrize("name", ["train:loss", "train/loss"])
def test_a_metric_that_a_checkpoint_has_is_not_logged(tmp_path, caplog, name):
    steps = Steps(tmp_path, save_period=1, metric_name=name)
    steps.end(1)
    assert steps.checkpoints.latest().metric == 0.5 and "metric_name" not in caplog.text
