"""File primitives on a disk that is really full or read-only, and the writers that use them."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpoints.checkpoint import Checkpoints, kept
from pipeline.config import CheckpointingConfig, LoggerConfig
from pipeline.files import storage
from pipeline.files.storage import RetryPolicy, StorageError, append, retrying, write_durably
from pipeline.job.attempt import Attempt, Superseded
from pipeline.observe.metrics import Metrics, read
from pipeline.train.shards import Shards
from tests.storage.disks import small_disk
from tests.test_metrics import Words, group

LONG = "x" * 100_000


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        yield disk


def later(work) -> threading.Timer:
    """Repair the disk after the first tries have failed."""
    timer = threading.Timer(0.5, work)
    timer.start()
    return timer


def test_a_file_is_the_old_or_the_new_one(disk):
    path = disk.path / "file"
    write_durably(path, "old")
    disk.fill()
    with pytest.raises(OSError) as error:
        write_durably(path, LONG)
    assert error.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert sorted(os.listdir(disk.path)) == ["ballast", "file"]


def test_an_interrupted_append_is_repeated(disk, caplog):
    caplog.set_level("INFO")
    path = disk.path / "lines"
    size = append(path, 0, b"one\n")
    disk.fill(leave=8192)
    timer = later(disk.free)
    text = LONG.encode() + b"\n"
    assert retrying(lambda: append(path, size, text), "writing lines", path, RetryPolicy(20)) == size + len(text)
    timer.join()
    assert path.read_bytes() == b"one\n" + text
    told, done = caplog.messages
    assert f"writing lines: {path}: No space left on device (ENOSPC); 0.0 of 2.1 MB" in told and "free space there" in told
    assert "done after" in done


def test_retries_end_and_the_error_names_what_is_kept(disk):
    disk.remount("ro")
    path = disk.path / "file"
    retry = RetryPolicy(0.3, kept=lambda: "Kept: all")
    with pytest.raises(StorageError) as error:
        retrying(lambda: write_durably(path, "x"), "writing it", path, retry)
    said = str(error.value)
    assert "Read-only file system (EROFS)" in said and "after 0.3 s of trying again (cluster.timeouts.storage)" in said
    assert said.endswith("the same command then goes on from the last checkpoint. Kept: all")


def test_permanent_errors_are_not_retried(tmp_path):
    with pytest.raises(FileNotFoundError):
        retrying(lambda: write_durably(tmp_path / "no/file", "x"), "writing", tmp_path, RetryPolicy(60))


def test_a_writer_that_waits_for_a_disk_does_not_write_after_a_later_attempt_has_begun(disk):
    old, new = (Attempt(disk.path / "attempts" / name) for name in ("old", "new"))
    for attempt in (old, new):
        attempt.folder.mkdir(parents=True)
    old.claim()
    metrics = Metrics(disk.path, LoggerConfig(tensorboard_enabled=False), None, RetryPolicy(20, old.check))
    metrics.log(1, {"a": 1.0})
    disk.fill(leave=32768)  # enough for the attempt's name, not for the line
    timer = later(new.claim)
    with pytest.raises(Superseded):
        metrics.log(2, {LONG: 1.0})
    timer.join()
    assert [line["step"] for line in read(disk.path / "metrics.jsonl")] == [1]


def test_another_nodes_files_are_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "file"
    timer = later(lambda: write_durably(path, "x"))
    storage.wait_for(path, 20)
    timer.join()
    with pytest.raises(StorageError, match="all nodes must see the same folder"):
        storage.wait_for(tmp_path / "never", 0.1)


# ---- files of a run -----------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_no_metric_and_curves_and_rollouts_only_while_it_lasts(disk, caplog):
    caplog.set_level("INFO")
    metrics = Metrics(disk.path, LoggerConfig(), None, RetryPolicy(20))
    metrics.log_rollouts(1, [group(1.0)], Words())
    metrics.log(1, {"loss": 1.0})
    disk.fill()
    metrics.log_rollouts(2, [group(*[1.0] * 100)], Words())
    timer = later(disk.free)
    metrics.log(2, {"loss": 2.0, LONG: 1.0})
    timer.join()
    metrics.log_rollouts(3, [group(1.0)], Words())
    metrics.log(3, {"loss": 3.0})
    metrics.close()
    assert [(line["step"], line["loss"]) for line in read(disk.path / "metrics.jsonl")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(disk.path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sorted(path.name for path in (disk.path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000003.jsonl"]
    told = caplog.text
    assert "rollouts of step 2 cannot be written" in told and "the data of steps 2 are lost" in told


def curve(run_dir, tag="loss"):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_missing_curves_are_written_at_the_next_start(tmp_path, caplog):
    metrics = Metrics(tmp_path, LoggerConfig(), None)
    metrics.log(1, {"loss": 1.0})
    (tmp_path / "tensorboard").rename(tmp_path / "away")
    (tmp_path / "tensorboard").write_text("in the way")
    metrics = Metrics(tmp_path, LoggerConfig(), 1)
    for step in (2, 3):
        metrics.log(step, {"loss": float(step)})
    metrics.close()
    assert caplog.text.count("TensorBoard of step") == 2  # at its start and at its end
    (tmp_path / "tensorboard").unlink()
    (tmp_path / "away").rename(tmp_path / "tensorboard")
    assert curve(tmp_path) == [(1, 1.0)]
    Metrics(tmp_path, LoggerConfig(), 2).close()  # continues from a checkpoint of step 2
    assert curve(tmp_path) == [(1, 1.0), (2, 2.0)]


def test_a_checkpoint_that_does_not_fit_leaves_no_part_and_keeps_the_complete_one(disk):
    checkpoints = Checkpoints(disk.path, "attempt", CheckpointingConfig(keep_top_k=None))
    retry = RetryPolicy(0.3, kept=lambda: kept(disk.path))

    def save(step, shards):
        partial = checkpoints.begin(step)
        with checkpoints.discarding():
            shards.write(partial, 0, retry)
        checkpoints.commit(partial, step, None, {})

    save(1, Shards({"a": torch.zeros(1000)}, {"ranks": 1}))
    with pytest.raises(StorageError, match="No space left") as error:
        save(2, Shards({"a": torch.zeros(1 << 20)}, {"ranks": 1}))
    assert "writing rank 0's 4.2 MB of a checkpoint" in str(error.value)
    assert str(error.value).endswith("Kept: the checkpoint of step 1, the last complete one, and no metrics yet")
    assert os.listdir(disk.path / "checkpoints") == ["step_000001"]
    save(3, Shards({"a": torch.zeros(1000)}, {"ranks": 1}))
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [1, 3]


def test_a_superfluous_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=1))

    def save(step):
        partial = checkpoints.begin(step)
        (partial / "weights").write_bytes(b"w")
        checkpoints.commit(partial, step, None, {})

    save(1)
    busy = tmp_path / "checkpoints/step_000001/busy"
    busy.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(busy)], check=False)  # a mounted folder cannot be removed
    if not busy.is_mount():
        pytest.skip("may not mount a file system here")
    save(2)
    assert "could not be removed" in caplog.text
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2]
    (left,) = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")]
    subprocess.run(["umount", str(left / "busy")], check=True)
    checkpoints.clean()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000002"]


def test_a_checkpoint_that_is_not_visible_on_this_node_yet_is_waited_for(tmp_path):
    checkpoints = Checkpoints(tmp_path, "attempt", CheckpointingConfig(keep_top_k=None))
    for step in (1, 2):
        partial = checkpoints.begin(step)
        checkpoints.commit(partial, step, None, {})
    attempt = Attempt(tmp_path / "attempts/a")
    attempt.folder.mkdir(parents=True)
    attempt.record_progress(2)
    hidden = tmp_path / "checkpoints/step_000002"
    hidden.rename(tmp_path / "unseen")
    timer = later(lambda: (tmp_path / "unseen").rename(hidden))
    assert checkpoints.latest().step == 2
    timer.join()
    hidden.rename(tmp_path / "unseen")  # removed by hand, and long ago
    os.utime(attempt.folder / "progress", (time.time() - 3600,) * 2)
    assert checkpoints.latest().step == 1


# ---- a rank's own log ---------------------------------------------------------------------------------------------------

PRINTS = """
import sys
from pipeline.files import rank_log
rank_log.set_up()
for i in range(400):
    print("a line of a hundred characters" * 3, flush=True)
(ballast,) = sys.argv[1:]
import os; os.unlink(ballast)
print("after")
raise RuntimeError("the token is " + os.environ["HF_TOKEN"])
"""


def test_a_full_disk_under_a_ranks_own_log_does_not_end_it(disk):
    disk.fill(leave=8192)
    with open(disk.path / "log", "a") as log:
        subprocess.run(
            [sys.executable, "-u", "-c", PRINTS, str(disk.path / "ballast")],
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_TOKEN": "not-to-be-seen"},
        )
    text = (disk.path / "log").read_text()
    assert re.search(r" WARNING \S+ \d+ characters of this log were lost: \[Errno 28\] No space left on device\nafter\n", text)
    assert "RuntimeError: the token is ***" in text


def test_metrics_jsonl_is_valid_json_after_all_faults(disk):
    path = disk.path / "metrics.jsonl"
    metrics = Metrics(disk.path, LoggerConfig(tensorboard_enabled=False), None)
    metrics.log(1, {"a": 1.0})
    disk.fill()
    with pytest.raises(StorageError):
        metrics.log(2, {LONG: 1.0})
    assert [line["step"] for line in read(path)] == [1]
    disk.free()
    Metrics(disk.path, LoggerConfig(tensorboard_enabled=False), 1).log(2, {"a": 2.0})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1.0, 2.0]
