"""Run a rank. `python -m launch.executors.rank_task FOLDER` is the command of every rank, under Slurm and on this machine.

All executors start it with the same environment (`HETSTEP_*`, see launch/executors/executor.py), so submitit needs one job
environment, not one per executor. It runs submitit's `process_job`, then exits by `os._exit`: the teardown of an inference
engine or of a process group may hang, and a rank that hangs keeps the whole job alive.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from submitit.core import plugins
from submitit.core.job_environment import JobEnvironment

from launch.executors.executor import own_pickle
from pipeline.config.determinism import ENGINES
from pipeline.files import rank_log
from pipeline.job import signals
from pipeline.node import caches

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the allocator's variable. An earlier name takes precedence (c10/core/AllocatorConfig.h)."""


class HetstepJobEnvironment(JobEnvironment):
    """submitit's description of a rank, read from the environment that all executors set."""

    _env = {  # noqa: RUF012 (declared ClassVar by the base class)
        "job_id": "HETSTEP_JOB_ID",
        "global_rank": "HETSTEP_RANK",
        "local_rank": "HETSTEP_LOCAL_RANK",
        "num_tasks": "HETSTEP_WORLD_SIZE",
    }

    def __repr__(self) -> str:
        return (
            f"rank {self.global_rank} of {self.num_tasks} ({os.environ['HETSTEP_COMPONENT']}) on"
            f" {os.environ['HETSTEP_NODE']}, attempt {os.environ['HETSTEP_ATTEMPT']}"
        )

    def _handle_signals(self, paths, submission) -> None:
        """Install no handlers: those of submitit requeue the job, and `main` has installed Hetstep's."""


def rank_main(run_dir: str) -> None:
    """Run the pipeline on this rank.

    This is the function that `launch/submit.py` submits. It imports the pipeline when called, so that submission never imports
    torch.
    """
    from pipeline import main

    main.main(Path(run_dir))


def run(folder: str) -> int:
    """Run the pickled submission in `folder` as this rank, and return its exit status. Errors go to stderr."""
    from submitit.core.submission import process_job

    environments = plugins.get_job_environments()
    assert isinstance(environments, dict), "submitit caches a dict"
    environments["hetstep"] = HetstepJobEnvironment()  # process_job selects it by SUBMITIT_EXECUTOR
    os.environ["SUBMITIT_EXECUTOR"] = "hetstep"
    try:
        own_pickle(Path(folder), os.environ["HETSTEP_JOB_ID"])
        process_job(folder)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def set_allocator() -> None:
    """Choose expandable segments on a rank that trains or scores on GPUs, unless a variable of ALLOCATORS is set.

    Packed batches differ in length, so fixed segments would fragment. Ranks of vLLM are left out: its sleep mode has an
    allocator of its own, and its all-reduce cannot share expandable segments between ranks.
    """
    has_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") != ""  # the executors' value for components without GPUs
    trains = os.environ["HETSTEP_COMPONENT"] not in ENGINES
    if trains and has_gpus and not any(name in os.environ for name in ALLOCATORS):
        os.environ[ALLOCATORS[0]] = "expandable_segments:True"


def main(folder: str) -> None:
    """Install the signal handlers, run the rank, and end the process with its status."""
    rank = int(os.environ["HETSTEP_RANK"])
    signals.install(rank)  # before the pipeline is imported, which takes seconds
    if rank == 0 and (path := os.environ.get("HETSTEP_SIGNALS")):
        signals.watch(Path(path))
    rank_log.set_up()
    caches.use_node_folders()
    set_allocator()
    status = run(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
