"""A real run whose ranks' root file systems end with a signal to their step, as with pyxis's use_squashfuse=1.

The stand-in for squashfuse is that of tests/slurm/pyxis_stub.c; that signals reach the ranks by the batch script is also shown,
without a pipeline, in tests/slurm/test_squashfuse.py.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.executors.executor import ROOT
from launch.runs.attempts import all_attempts
from tests.conftest import require_slurm
from tests.end_to_end.test_slurm_faults import PATIENT, SAVES_WHEN_TOLD, Held, checkpoints, complete
from tests.slurm import pyxis
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[SlurmCluster]:
    require_slurm()
    if lacking := pyxis.missing():
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(f"not here: {lacking}")
    with pyxis.cluster(tmp_path_factory.mktemp("squashfuse"), 4, squashfuse=True) as cluster:
        yield cluster


def contained(folder: Path) -> list[str]:
    keys = {
        "container_image": pyxis.image(folder / "x.sqsh"),
        "container_mounts": f"[{folder},{ROOT}]",
        "container_workdir": ROOT,
        "python": sys.executable,
    }
    return [f"cluster.{name}.{key}={value}" for name in ("train", "generate") for key, value in keys.items()]


def test_a_signal_to_the_batch_script_saves_the_step_and_the_job_is_requeued(cluster, tmp_path, uninterrupted):
    held = Held(cluster, tmp_path / "run", SAVES_WHEN_TOLD, PATIENT, *contained(tmp_path))
    held.slurm("scancel", "--batch", "--signal=USR2", held.job_id)
    held.go_on()
    complete(held.end(), uninterrupted)
    first = all_attempts(held.folder)[0]
    assert first.verdict == "requeue: SIGUSR2 came" and first.progress == 3


def test_scancel_loses_the_steps_after_the_last_checkpoint(cluster, tmp_path):
    """Slurm itself sends SIGTERM to the steps here, as the note at submission states."""
    held = Held(cluster, tmp_path / "run", SAVES_WHEN_TOLD, PATIENT, *contained(tmp_path))
    held.slurm("scancel", held.job_id)
    run = held.end()
    assert run.status == 1 and "CANCELLED" in run.output, run.output
    assert "scancel and scontrol requeue lose all training steps after the last checkpoint" in run.output
    assert checkpoints(run.folder) == []
