"""Checkpoints: an incomplete one is never chosen, whenever its writer was killed."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from pipeline import config
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import COMPLETE, VERSION, Checkpoint, Checkpoints, superfluous, version_problem
from pipeline.config import CheckpointingConfig


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=None))


def save(checkpoints, step, metric=None):
    partial = checkpoints.begin(step)
    (partial / "weights").write_bytes(b"w" * step)
    (partial / "hf").mkdir()
    (partial / "hf" / "config.json").write_text("{}")
    return checkpoints.commit(partial, step, metric, {"stream": {"position": step}})


def test_latest_is_the_highest_step(checkpoints):
    assert checkpoints.latest() is None
    for step in (2, 10, 9):
        save(checkpoints, step)
    assert checkpoints.latest().step == 10
    assert checkpoints.latest().state == {"stream": {"position": 10}}


def test_partial_folders_are_not_checkpoints_and_are_cleaned(checkpoints):
    save(checkpoints, 1)
    partial = checkpoints.begin(2)
    (partial / "weights").write_bytes(b"w")
    assert checkpoints.latest().step == 1
    checkpoints.clean()
    assert not partial.exists()
    assert checkpoints.latest().step == 1


@pytest.mark.parametrize("damage", ["truncate", "delete", "no record", "half a record", "no folder entry"])
def test_a_damaged_checkpoint_is_skipped_and_can_be_written_again(checkpoints, damage):
    save(checkpoints, 1)
    folder = save(checkpoints, 2).folder
    if damage == "truncate":
        (folder / "weights").write_bytes(b"w")
    elif damage == "delete":
        (folder / "weights").unlink()
    elif damage == "no record":
        (folder / COMPLETE).unlink()
    elif damage == "half a record":
        (folder / COMPLETE).write_text((folder / COMPLETE).read_text()[:30])
    else:
        (folder / "hf" / "config.json").unlink()
    assert checkpoints.latest().step == 1
    save(checkpoints, 2)
    assert checkpoints.latest().step == 2


@pytest.mark.parametrize("name", ["step_000001_keep", "step_best", "step_"])
def test_other_files_beside_them_are_not_checkpoints(tmp_path, checkpoints, name):
    shutil.copytree(save(checkpoints, 1).folder, tmp_path / "checkpoints" / name)
    save(checkpoints, 2)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 2]
    assert (tmp_path / "checkpoints" / name / COMPLETE).exists()


def test_two_attempts_write_separately(tmp_path):
    old, new = (Checkpoints(tmp_path, name, CheckpointingConfig(keep_top_k=None)) for name in ("old", "new"))
    first, second = old.begin(3), new.begin(3)
    (first / "weights").write_bytes(b"old")
    (second / "weights").write_bytes(b"new")
    new.commit(second, 3, None, {})
    (first / "weights").write_bytes(b"later")
    assert (new.latest().folder / "weights").read_bytes() == b"new"


def kept(metrics, higher_is_better=True, top=2):
    config = CheckpointingConfig(keep_top_k=top, higher_is_better=higher_is_better)
    all_of_them = [Checkpoint(None, step, metric, {}) for step, metric in enumerate(metrics)]
    gone = superfluous(all_of_them, config)
    return [c.step for c in all_of_them if c not in gone]


def test_the_best_and_the_latest_are_kept():
    assert kept([0.9, 0.1, 0.8, 0.2]) == [0, 2, 3]
    assert kept([0.9, 0.1, 0.8, 0.2], higher_is_better=False) == [1, 3]
    assert kept([None, None, None]) == [1, 2]
    assert kept([0.5, None, 0.4, None]) == [0, 2, 3]
    assert kept([-0.5, None, -0.4]) == [0, 2]
    assert kept([0.1, 0.2], top=0) == [1]


def test_a_nan_metric_is_worse_than_any_other():
    nan = float("nan")
    assert kept([0.9, nan, 0.95, 0.5]) == [0, 2, 3]
    assert kept([0.9, nan, 0.95, 0.5], higher_is_better=False) == [0, 3]
    assert kept([nan, None, nan, 0.5], top=1) == [3]


def test_commit_removes_superfluous_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=1))
    for step, metric in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(checkpoints, step, metric)
    assert [c.step for c in checkpoints.all()] == [1, 3]


def test_a_commit_does_not_list_the_files_of_earlier_checkpoints_again(tmp_path, monkeypatch):
    """Each may have thousands, and rank 0 waits for the file system."""
    looked = []
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda folder: looked.append(folder.name) or read(folder))
    earlier = Checkpoints(tmp_path, "earlier", CheckpointingConfig(keep_top_k=2))
    save(earlier, 1)
    assert looked == []
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=2))
    for step in range(2, 6):
        save(checkpoints, step, metric=-step)
    assert looked == ["step_000001"]
    assert [each.step for each in checkpoints.all()] == [2, 3, 5]


def test_the_manifest_names_every_file(checkpoints):
    folder = save(checkpoints, 4).folder
    assert json.loads((folder / COMPLETE).read_text())["files"] == {"weights": 4, "hf/config.json": 2}


def test_the_sizes_of_thousands_of_files_are_read_once_and_concurrently(tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    for number in range(40):
        (tmp_path / "hf" / f"{number}").write_text("x" * number)
    asked, ask = [], Path.stat

    def noting(path, **how):
        if path.name.isdecimal():
            asked.append(threading.current_thread())
        return ask(path, **how)

    monkeypatch.setattr(Path, "stat", noting)
    assert checkpoint._sizes(tmp_path) == {f"hf/{number}": number for number in range(40)}
    assert threading.main_thread() not in asked and len(asked) == 40


WARM_UP = "policy.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 5}}"
CRITICS = "value.scheduler={name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 5}}"
SEVERAL = "policy.train_global_batch_size=32"  # of 128 samples in a step
EPOCHS = ("policy.train_global_batch_size=128", "ppo.ppo_epochs=2")


@pytest.mark.parametrize(
    ("recipe", "overrides", "updates"),
    [
        ("tiny_grpo", (SEVERAL,), None),  # no schedule
        ("tiny_grpo", (SEVERAL, WARM_UP), 4),
        ("tiny_sft", (WARM_UP,), None),  # one update a step
        ("tiny_ppo", (*EPOCHS, CRITICS), 2),
        ("tiny_ppo", (*EPOCHS, CRITICS, "ppo.schedule_every_epoch=true"), None),
    ],
)
def test_a_schedule_that_counted_updates_is_refused_if_a_step_has_several(checkpoints, recipe, overrides, updates):
    """Checkpoints of earlier versions, which have no version, counted updates."""
    loaded = config.load(recipe, [f"run_dir={checkpoints._folder}", *overrides])
    assert version_problem(save(checkpoints, 1), loaded) is None
    assert checkpoints.latest().version == VERSION == 3
    record = json.loads((checkpoints.latest().folder / COMPLETE).read_text())
    del record["version"]
    (checkpoints.latest().folder / COMPLETE).write_text(json.dumps(record))
    problem = version_problem(checkpoints.latest(), loaded)
    if updates is None:
        assert problem is None
    else:
        assert (problem.key, problem.code) == ("run_dir", "wrong-version")
        assert f"A step has {updates} updates" in problem.message
