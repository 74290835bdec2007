"""Run the components as one Slurm job, with one background srun per component.

The job is heterogeneous if several components have nodes of their own. Each component has its own srun, because an image
of pyxis is an option of a whole srun. Slurm numbers ranks per step, so the batch script tells each step its first global rank.
batch.sh has the code before and after the steps, and launch/executors/nodes.py builds the options of the allocation and the
steps. Job arrays are not supported, because Slurm refuses them for heterogeneous jobs. For options, states and pitfalls see
https://slurm.schedmd.com/heterogeneous_jobs.html
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from submitit.slurm import slurm
from typing_extensions import override

from launch.executors import nodes, slurm_client, slurm_environment
from launch.executors.containers import runtime, runtimes
from launch.executors.executor import ROOT, JobStatus
from launch.executors.nodes import NodeShare
from launch.executors.slurm_client import TERMINAL, JobComponent, SlurmError
from pipeline.config import ClusterConfig, ComponentConfig, ranks

GONE = "GONE"
"""The state of a job that neither slurmctld nor accounting knows. Slurm has no such state."""

SIGNAL_LEAD_S = 60
"""Seconds before the time limit at which Slurm sends SIGUSR2 to the batch script, which informs the ranks. Slurm may send it up
to a minute earlier. The ranks know the original limit, so the signal serves two cases: a limit that is shortened later, and
preemption with PreemptParameters=send_user_signal. Each component requests the signal, so that none gets SIGTERM at
preemption."""
SIGNALLED_MIN = 10
"""Jobs with a shorter limit get no signal, because it would arrive before their first step."""
JOB = (
    *(
        "trap 'tell_ranks SIGTERM' TERM",
        "trap 'tell_ranks SIGUSR2' USR2",
    ),  # steps inherit an ignored signal, but not these traps
    *("start", "end_attempt", "finish_job"),
)
"""The main part of a batch script, which calls functions of batch.sh."""
SPECIAL_TO_SBATCH = re.compile(r"(?i)(?=[^\w./:=,@%+ -])|(?<=het)(?=job)|(?<=pack)(?=job)")
BACKSLASH = r"\\"


# ---- the batch script ---------------------------------------------------------------------------------------------------


def batch_script(
    run_dir: Path,
    name: str,
    cluster: ClusterConfig,
    components: dict[str, ComponentConfig],
    after: tuple[str, ...] = (),
    behind: tuple[str, ...] = (),
) -> str:
    """Return the text of the batch script.

    after: ids of jobs that must succeed before this one starts. behind: ids of jobs that must only end.
    """
    header = []
    for k, host in enumerate(nodes.hosts(components).values()):
        header += ["#SBATCH hetjob"] if k else []
        header += directives(*request_options(name, cluster, host))
        if k == 0:  # options of the one batch script
            header += directives(f"--output={run_dir}/submitit/%j_0_log.out", "--open-mode=append")
            if earlier := dependency(afterok=after, afterany=behind):
                header += directives(f"--dependency={earlier}")
            header += directives("--kill-on-invalid-dep=yes") if after else []
            header += directives("--requeue" if cluster.requeue.enabled else "--no-requeue")
    return "\n".join(["#!/bin/bash", *header, "", attempt_text(run_dir, cluster, components), "", *JOB, ""])


def request_options(name: str, cluster: ClusterConfig, host: ComponentConfig) -> list[str]:
    """Return the unquoted sbatch options that request the nodes of a component of `nodes.hosts`.

    Environment variables may set options that the recipe leaves open: `slurm_environment.WISHES`.
    """
    host = slurm_environment.with_wishes(host)
    options = [f"--job-name={name.replace(' ', '_')}", f"--time={cluster.time_min}", *nodes.allocation_options(host)]
    return [*options, f"--signal=B:USR2@{SIGNAL_LEAD_S}"] if cluster.time_min >= SIGNALLED_MIN else options


def attempt_text(
    run_dir: Path,
    cluster: ClusterConfig,
    components: dict[str, ComponentConfig],
    job_id: str = "$SLURM_JOB_ID",
    attempt: str = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}",
    places: list[str] | None = None,
) -> str:
    """Return bash functions: `start`, which starts all ranks in the current allocation; the functions of batch.sh; `verdict`.

    job_id, attempt: bash texts inside double quotes. places: each component's srun options that select its nodes; None: those
    of a job of our own.
    """
    steps, first = [], 0
    places = places or _places(components)
    for (name, share), node_options in zip(nodes.shares(components).items(), places, strict=True):
        steps += _step(name, share, first, node_options, run_dir, cluster.container_runtime)
        first += ranks(share.component)
    requeue = cluster.requeue
    lines = [
        f"export HETSTEP_RUN_DIR={shlex.quote(str(run_dir))} HETSTEP_WORLD_SIZE={first}",
        f'export HETSTEP_JOB_ID="{job_id}" HETSTEP_ATTEMPT="{attempt}"',
        f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}",
        f"requeue={str(requeue.enabled).lower()} max_restarts={requeue.max_restarts}",
        "begin_attempt",
        *steps,
    ]
    body = "\n".join(["start() {", *(f"    {line}" for line in lines), "}"])
    functions = (ROOT / "launch/executors/batch.sh").read_text()
    verdict = (ROOT / "launch/executors/verdict.sh").read_text().removeprefix("#!/bin/bash\n")
    return f"{body}\n\n{functions}\nverdict() (\n{verdict})"


def _places(components: dict[str, ComponentConfig]) -> list[str]:
    """Return the srun options that select each component's nodes in a job of our own."""
    groups = nodes.groups(components)
    if len(groups) == 1:
        return [overlap(components)] * len(components)
    shared = overlap(components)
    return [f"--het-group={k} {shared}".strip() for k, names in enumerate(groups) for _ in names]


def overlap(components: dict[str, ComponentConfig]) -> str:
    """Return the srun option with which steps share nodes, CPUs and GPUs; "" if no nodes are shared."""
    return "" if all(share.alone for share in nodes.shares(components).values()) else "--overlap"


def dependency(**job_ids: tuple[str, ...]) -> str | None:
    """Return a value of --dependency that requires all of some jobs; None without jobs. job_ids: dependency type -> job ids."""
    return ",".join(f"{kind}:{':'.join(ids)}" for kind, ids in job_ids.items() if ids) or None


def directives(*options: str) -> list[str]:
    """Return the #SBATCH lines with these options.

    A backslash escapes each character that sbatch might interpret: unlike a shell, sbatch interprets a backslash inside quotes
    too, and ends a word at a blank after one. Backslashes also split the words `hetjob` and `packjob`, because sbatch takes a
    line with one of them anywhere as a separator of components.
    """
    escaped = [SPECIAL_TO_SBATCH.sub(BACKSLASH, option) for option in options]
    return [f'#SBATCH "{option}"' if " " in option else f"#SBATCH {option}" for option in escaped]


def _step(name: str, share: NodeShare, first_rank: int, node_options: str, run_dir: Path, container_runtime: str) -> list[str]:
    """Return lines of bash that start a background srun and add it to `steps`.

    The task redirects its own output, because srun's %t is not the global rank. Ranks use no MPI, and MpiDefault=pmix fails in
    images without PMIx.
    """
    component = share.component
    command = [component.python or sys.executable, "-P", "-u", "-m", "launch.executors.rank_task", f"{run_dir}/submitit"]
    if component.env_vars:  # not export, because bash evaluates assignments to RANDOM and others
        command = ["env", *(f"{key}={value}" for key, value in component.env_vars.items()), *command]
    task = [
        "trap '' USR2",  # until Python installs its handler
        *runtime.task_exports(component),
        *nodes.gpu_exports(share),
        f"export HETSTEP_COMPONENT={name} HETSTEP_LOCAL_RANK=$SLURM_LOCALID HETSTEP_NODE=$SLURMD_NODENAME",
        f"export HETSTEP_RANK=$(({first_rank} + SLURM_PROCID))",
        *nodes.thread_exports(share),
        'exec >>"$HETSTEP_RUN_DIR/attempts/$HETSTEP_ATTEMPT/$(printf rank%05d.log "$HETSTEP_RANK")" 2>&1',
        f"exec {shlex.join(command)}",
    ]
    container_options, prefix = runtimes.start(container_runtime, component)
    options = [*nodes.step_options(share), *container_options, *component.srun_args]
    srun = f"{slurm_environment.unset_for_steps()} srun {node_options} --mpi=none --kill-on-bad-exit=1 {shlex.join(options)}"
    srun += f" {shlex.join([*prefix, 'bash', '-c', '; '.join(task)])}"
    return [f'{srun} >"$attempt/srun-{name}.out" 2>&1 &', f"steps[$!]={shlex.quote(f'{name} {first_rank}')}"]


# ---- the job's state ----------------------------------------------------------------------------------------------------


class HetWatcher(slurm.SlurmInfoWatcher):
    """Reads states from `scontrol show job`, which needs no accounting, or from sacct once slurmctld has forgotten the job.

    submitit's watcher reads only sacct, and never finds the state of a heterogeneous job, whose rows are named `17+0`, `17+1`.
    Each job has a watcher of its own, because submitit's, which all jobs share, returns stale states from its cache.
    """

    @override
    def update(self) -> None:
        for job_id in self._registered - self._finished:
            self._num_calls += 1
            try:
                part = slurm_client.merge_components(slurm_client.job_components(job_id) or [JobComponent(job_id, GONE)])
                named = {"JobID": part.job_id, "State": part.state, "NodeList": part.nodes, "Reason": part.reason}
                self._info_dict[job_id] = named
            except SlurmError as error:  # keep the last known state
                if error.kind == "missing":
                    raise
            if self.is_done(job_id, mode="cache"):
                self._finished.add(job_id)
        self._last_status_check = time.time()

    @override
    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode) in {*TERMINAL, GONE}


def job_status(part: JobComponent) -> JobStatus:
    """Return the status of a job whose components `slurm_client.merge_components` has merged."""
    return JobStatus(part.state, part.reason, ended=part.state in {*TERMINAL, GONE})


# ---- submitting ---------------------------------------------------------------------------------------------------------


class HetSlurmJob(slurm.SlurmJob):
    """A heterogeneous or plain Slurm job. Its id is that of the leading component."""

    start_time: int | None = None  # not needed, because a cluster does not reuse ids

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)):
        self.watcher = HetWatcher(delay_s=15)
        super().__init__(folder, job_id, tasks)

    def status(self, now: bool = False) -> JobStatus:
        """Return the job's status. It is at most 15 s old, or queried again if `now` is true."""
        info = self.watcher.get_info(self.job_id, mode="force" if now else "standard")
        return job_status(JobComponent(self.job_id, info.get("State", "UNKNOWN"), reason=info.get("Reason", "")))

    def cancel(self, check: bool = True) -> None:
        """Cancel all components. check: raise SlurmError if scancel fails."""
        with contextlib.nullcontext() if check else contextlib.suppress(SlurmError):
            slurm_client.run_command("scancel", self.job_id, timeout_s=slurm_client.CHANGE_S)

    def name(self) -> str:
        """Return the job's name for people."""
        return f"Slurm job {self.job_id}"


class HetSlurmExecutor(slurm.SlurmExecutor):
    """Runs one function on every rank of `components`. Pickles and the batch log are in <run_dir>/submitit."""

    job_class = HetSlurmJob

    def __init__(
        self,
        run_dir: Path,
        name: str,
        cluster: ClusterConfig,
        components: dict[str, ComponentConfig],
        after: tuple[str, ...] = (),
        behind: tuple[str, ...] = (),
    ):
        super().__init__(run_dir / "submitit")
        self.components = components
        self.script = batch_script(run_dir, name, cluster, components, after, behind)
        self.parameters = {"time": cluster.time_min}  # for submitit's bookkeeping; Slurm reads the script

    def _submit_command(self, command: str) -> HetSlurmJob:
        """Submit the batch script. Raises SlurmError."""
        job_id = slurm_client.submit(self.script)
        job = HetSlurmJob(self.folder, job_id, range(self._num_tasks()))
        job.paths.submission_file.write_text(self.script)
        return job

    def _num_tasks(self) -> int:
        return sum(ranks(component) for component in self.components.values())

    def _internal_process_submissions(self, delayed_submissions):
        if len(delayed_submissions) != 1:
            raise ValueError("a heterogeneous job cannot be a job array: submit one function at a time")
        return super()._internal_process_submissions(delayed_submissions)
