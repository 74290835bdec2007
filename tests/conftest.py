"""Fixtures that several test folders use."""

import fcntl
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.slurm.cluster import SlurmCluster, missing


def require_slurm() -> None:
    """Skips where Slurm is not installed."""
    if lacking := missing():
        message = (
            f"NO SLURM HERE ({', '.join(lacking)}): nothing about Slurm is tested. HETSTEP_REQUIRE_SLURM=1 makes this a failure"
        )
        (pytest.fail if os.environ.get("HETSTEP_REQUIRE_SLURM") == "1" else pytest.skip)(message)


# Folders with the slowest files come first, so that all workers end at about the same time. Folders on one line alternate:
# Slurm's tests mostly wait, so that others can compute beside them.
SLOW = (("end_to_end", "slurm"), ("train",), ("generate",), ("refit",), ("launch", "world"), ("storage", "sandbox"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the slow folders."""
    tests = Path(__file__).parent
    of_folder: dict[str, dict[Path, int]] = {}

    def order(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(tests).parts[0]
        files = of_folder.setdefault(folder, {})
        line = next((number for number, folders in enumerate(SLOW) if folder in folders), len(SLOW))
        return line, files.setdefault(item.path, len(files)) if line < len(SLOW) else 0

    items.sort(key=order)  # stable: within a file the order stays


def pytest_configure(config: pytest.Config) -> None:
    """Start a fork server for all workers, where several of them run all tests."""
    starts_workers = not hasattr(config, "workerinput") and config.getoption("numprocesses", None)
    if starts_workers and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        fork_server.share()


def pytest_collection_finish() -> None:
    """All test files, and with them most libraries, are imported now."""
    importlib.import_module("tests.heap")


@pytest.fixture(scope="module", autouse=True)
def _preloaded_libraries() -> Iterator[None]:
    """Undo the change of vLLM's CPU platform to LD_PRELOAD, which processes of other files' tests would inherit."""
    before = os.environ.get("LD_PRELOAD")
    yield
    os.environ.pop("LD_PRELOAD", None)
    if before is not None:
        os.environ["LD_PRELOAD"] = before


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a function (name, make) -> folder. The first of pytest's workers that requests it calls `make(folder)`."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        made = base / name
        with open(base / f"{name}.lock", "a") as lock:  # it is not empty: it is complete
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_size:
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                make(made)
                lock.write("made")
        return made

    return folder


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Start a real Slurm cluster of four nodes on this machine.

    Its `env` is for subprocesses. Skips where Slurm is not installed.
    """
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # a short path: it holds a Unix socket
        cluster = SlurmCluster(Path(folder), nodes=4)
        cluster.start()
        yield cluster
        cluster.stop()
