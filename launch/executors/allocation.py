"""Run the steps of the batch script in the Slurm allocation that this process is already in.

Inside an `salloc`, a controller starts the ranks, and starts them again after a crash if verdict.sh says so. It outlives the
terminal but not the allocation. If the ranks exit on purpose, the run ends, because the allocation has no time left. A batch
job of launch/hetstep.sbatch runs and ends its steps as a job of `launch/submit.py` does: Slurm may requeue it, and job.json
records it. The allocation's time limit counts, not cluster.time_min.

In a heterogeneous allocation the k-th component runs in the k-th part. In a plain one each component has nodes of its own, in
the same order. The step of a colocated component (launch/executors/nodes.py) overlaps that of the component before it.
`launch/preflight/current_allocation.py` checks that the allocation is large enough.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

from submitit.local import local
from typing_extensions import override

from launch.executors import slurm
from launch.executors.executor import JobStatus, start_detached
from launch.executors.local import HetLocalJob, start_time
from launch.executors.nodes import ColocatedComponent
from pipeline.config import ClusterConfig, ComponentConfig, ranks

IN_BATCH = "HETSTEP_SBATCH"
"""launch/hetstep.sbatch sets this to its job's id. Other jobs may inherit the variable, so the id is compared."""
SHELLS = (0xFFFFFFFA, 0xFFFFFFFB)
"""Ids of steps that may start other steps: slurm.h's SLURM_INTERACTIVE_STEP (the shell of an salloc on its first node) and
SLURM_BATCH_SCRIPT (the batch script). In such a shell some versions leave SLURM_STEP_ID unset, and 26.05 sets it to -5."""
CONTROLLER = Path(__file__).with_suffix(".sh")
"""The controller's script in an salloc, appended to the functions of slurm.py."""
BUSY_S = 120
"""How long srun waits for nodes on which an earlier step is ending. Without a bound it waits forever."""


def current() -> str | None:
    """Return the id of the job in whose allocation this process may start steps; None outside of one, or inside a step."""
    step = os.environ.get("SLURM_STEP_ID")
    if step is not None and int(step) % (1 << 32) not in SHELLS:
        return None
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SLURM_JOB_ID_HET_GROUP_0")


def batch_job() -> str | None:
    """Return the job's id if this process runs in the batch script of launch/hetstep.sbatch; else None."""
    job_id = current()
    return job_id if job_id and os.environ.get(IN_BATCH) == job_id else None


# ---- the script ---------------------------------------------------------------------------------------------------------


def script(run_dir: Path, cluster: ClusterConfig, components: dict[str, ComponentConfig]) -> str:
    """Return the bash script that runs in the allocation."""
    if batch_job():
        functions = slurm.attempt_text(run_dir, cluster, components, places=_places(components, "hetstep"))
        return "\n".join(["#!/bin/bash", functions, "", *slurm.JOB, ""])
    functions = slurm.attempt_text(
        *(run_dir, cluster, components, "$$", "$SLURM_JOB_ID.$$-$restart"), places=_places(components, "$step_name")
    )
    submitit = shlex.quote(f"{run_dir}/submitit")
    return "\n".join(["#!/bin/bash", functions, "", f"submitit={submitit}", CONTROLLER.read_text()])


def _places(components: dict[str, ComponentConfig], name: str) -> list[str]:
    """Return each component's srun options that select its nodes and name its step.

    name: the step's name as bash text inside double quotes.
    """
    het = "SLURM_HET_SIZE" in os.environ
    places, part, first_node, next_node = [], -1, 0, 0
    for component in components.values():
        if not isinstance(component, ColocatedComponent):
            part, first_node, next_node = part + 1, next_node, next_node + component.nodes
        nodes = f"--het-group={part}" if het else f"--relative={first_node}"
        options = [nodes, slurm.overlap(components), f"--immediate={BUSY_S}", f'--job-name="{name}"']
        places.append(" ".join(filter(None, options)))
    return places


# ---- jobs ---------------------------------------------------------------------------------------------------------------


class AllocationJob(HetLocalJob):
    """The controller in an salloc."""

    @override
    def name(self) -> str:
        return f"process {self.job_id} in an allocation"


class BatchStepsJob(slurm.HetSlurmJob):
    """The steps of the batch job that this process runs in. Other processes see only the batch job."""

    process: subprocess.Popen

    def forward_signals(self) -> None:
        """Forward SIGTERM and SIGUSR2 to the steps' script, which informs the ranks. Call it in the main thread."""
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda number, _: self.process.send_signal(number))

    @override
    def status(self, now: bool = False) -> JobStatus:
        status = self.process.poll()
        if status is None:
            return JobStatus("RUNNING")
        return JobStatus("FAILED" if status else "COMPLETED", f"status {status}" if status else "", ended=True)

    @override
    def cancel(self, check: bool = True) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # srun ends its step then


class AllocationExecutor(local.LocalExecutor):
    """Runs one function on every rank of `components`. Pickles and the controller's log are in <run_dir>/submitit."""

    job_class = AllocationJob

    def __init__(self, run_dir: Path, cluster: ClusterConfig, components: dict[str, ComponentConfig]):
        super().__init__(run_dir / "submitit")
        self.run_dir = run_dir
        self.components = components
        self.batch_job = batch_job()
        self.script = script(run_dir, cluster, components)
        self.parameters = {"timeout_min": cluster.time_min}  # for submitit's bookkeeping

    @property
    def kind(self) -> str:
        """The executor's name for job.json, by which other processes know how to query the job."""
        return "slurm" if self.batch_job else "allocation"

    def _num_tasks(self) -> int:
        return sum(ranks(component) for component in self.components.values())

    def _submit_command(self, command: str) -> AllocationJob | BatchStepsJob:
        path = self.folder / "allocation.sh"
        path.write_text(self.script)
        job_id = current()
        assert job_id is not None, "preflight has found the allocation"
        log = self.folder / (f"{self.batch_job}_0_log.out" if self.batch_job else "controller.log")
        with open(log, "ab") as out:
            # The script ends its own process group, which is not this one's.
            process = start_detached(["bash", str(path)], out, {**os.environ, "SLURM_JOB_ID": job_id})
        if self.batch_job is None:
            tasks = range(self._num_tasks())
            return AllocationJob(self.folder, str(process.pid), tasks, process, start_time=start_time(process.pid))
        job = BatchStepsJob(self.folder, self.batch_job)
        job.process = process
        job.forward_signals()
        return job
