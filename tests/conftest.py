"""Fixtures that several test folders use."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, missing


def require_slurm() -> None:
    """Skips where Slurm is not installed."""
    if lacking := missing():
        message = (
            f"NO SLURM HERE ({', '.join(lacking)}): nothing about Slurm is tested. HETSTEP_REQUIRE_SLURM=1 makes this a failure"
        )
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(message)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A real Slurm cluster of four nodes on this machine; its `env` is for subprocesses. Skips where Slurm is not installed."""
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: it holds a Unix socket
        cluster = SlurmCluster(Path(folder), nodes=4)
        cluster.start()
        yield cluster
        cluster.stop()
