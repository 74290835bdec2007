"""Whole tiny runs whose run folder's disk becomes full or read-only while they run."""

import contextlib
import os
import subprocess
import threading
import time

import pytest

from tests.end_to_end.runs import LOCAL, submit
from tests.storage.disks import small_disk

ENOUGH, SMALL = "80m", "26m"  # two of the four checkpoints of 9 MB fit


def printed(run_dir):
    return "".join(path.read_text(errors="replace") for path in sorted(run_dir.glob("attempts/*/rank*.log")))


def steps(run_dir):
    """Return the steps of its checkpoints, and the remains of others."""
    return sorted(os.listdir(run_dir / "checkpoints"))


def do(*works) -> threading.Thread:
    """steps: pairs of (when, what to do), one after the other."""

    def all_of_them() -> None:
        for is_time, work in works:
            while not is_time():
                time.sleep(0.05)
            work()

    thread = threading.Thread(target=all_of_them, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the undisturbed run."""
    return submit(tmp_path_factory.mktemp("whole") / "run", *LOCAL)


@pytest.mark.full  # by default: test_files.py
@pytest.mark.parametrize("saving", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_a_run_waits_for_a_full_disk_and_continues(tmp_path, saving):
    with small_disk(tmp_path / "disk", ENOUGH) as disk:
        run_dir = disk.path / "run"
        events = do(
            (lambda: list(run_dir.glob("attempts/*/started")), lambda: disk.remount(f"size={SMALL}")),
            (lambda: "trying again" in printed(run_dir), lambda: disk.remount(f"size={ENOUGH}")),
        )
        overrides = ("cluster.timeouts.storage=120", f"checkpointing.async_save={str(saving == 'async').lower()}")
        run = submit(run_dir, *LOCAL, *overrides, timeout=600)
        assert run.status == 0, run.output
        events.join(1)
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        assert steps(run_dir) == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
        assert "of a checkpoint: " in printed(run_dir) and "No space left on device (ENOSPC)" in printed(run_dir)
        assert len(list((run_dir / "attempts").glob("*/started"))) == 1


@pytest.mark.long
@pytest.mark.parametrize("saving", ["sync", "async"])
def test_a_run_ends_if_the_disk_stays_full_and_the_same_command_continues(tmp_path, whole, saving):
    background = f"checkpointing.async_save={str(saving == 'async').lower()}"
    with small_disk(tmp_path / "disk", ENOUGH) as disk:
        run_dir = disk.path / "run"
        do((lambda: list(run_dir.glob("attempts/*/started")), lambda: disk.remount(f"size={SMALL}")))
        ended = submit(run_dir, *LOCAL, background, "cluster.timeouts.storage=1", "cluster.requeue.max_restarts=0", timeout=600)
        assert ended.status == 1
        message = ended.failure()["message"]
        assert "No space left on device (ENOSPC)" in message and "after 1 s of trying again" in message
        assert "Kept: the checkpoint of step 2, the last complete one, and the metrics to step" in message
        assert message.splitlines()[0] in ended.output
        assert steps(run_dir)[-2:] == ["step_000001", "step_000002"]
        disk.remount(f"size={ENOUGH}")
        resumed = submit(run_dir, *LOCAL, background, timeout=600)
        assert resumed.status == 0, resumed.output
        assert steps(run_dir) == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
        assert resumed.metrics() == whole.metrics()


@pytest.mark.long
def test_a_run_whose_checkpoints_folder_turns_read_only(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with small_disk(run_dir / "checkpoints", ENOUGH) as disk:
        do(
            (lambda: "step_000001" in steps(run_dir) and read_only(disk), lambda: None),
            (lambda: "Read-only file system (EROFS)" in printed(run_dir), lambda: disk.remount("rw")),
        )
        run = submit(run_dir, *LOCAL, "cluster.timeouts.storage=120")
        assert run.status == 0, run.output
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        assert steps(run_dir) == [f"step_{step:06d}" for step in (1, 2, 3, 4)]


def read_only(disk):
    """Return whether it succeeded: it cannot while a file is open for writing."""
    with contextlib.suppress(subprocess.CalledProcessError):
        disk.remount("ro")
        return True
