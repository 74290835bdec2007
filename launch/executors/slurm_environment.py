"""Control the effect of Slurm's environment variables on a submission, so that none of them overrides the recipe.

sbatch reads a variable for each of its options, and a variable overrides the batch script: SBATCH_MEM_PER_NODE shrinks the
memory, SBATCH_NO_REQUEUE ends a run at its first requeue, SBATCH_OUTPUT moves the log. So sbatch is called without SBATCH_*
variables, except those of `PASSED`; this covers variables of later versions too. The variables of `WISHES` say how a site or a
user books all jobs. They become options of components whose recipe does not set these options. See sbatch(1), INPUT ENVIRONMENT
VARIABLES.

srun, too, reads SLURM_* and SRUN_* variables as options, which a job may have inherited. So `STEP_VARIABLES` are unset for each
step.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace

from pipeline.config import ComponentConfig
from pipeline.config.sbatch import NAME as OPTION
from pipeline.config.sbatch import OF_A_COMPONENT, OF_THE_JOB, REFUSED

WISHES = ("partition", "account", "qos", "constraint", "reservation", "wckey")
"""Options that a component takes from the variable SBATCH_<OPTION> if the recipe does not set them."""
PASSED = ("SBATCH_ACCTG_FREQ", "SBATCH_DEBUG", "SBATCH_PROFILE")
"""Variables that are passed on to sbatch: they change what Slurm records and prints, not the job."""
OPTIONS = {
    "mem-per-node": "mem",
    "timelimit": "time",
    "array-inx": "array",
    "req-switch": "switches",
}
"""Name from a variable SBATCH_* -> name of its option, where they differ."""

STEP_VARIABLES = (
    # sbatch sets these from the leading component, so other components would get the leader's numbers.
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"),
    *("SLURM_TRES_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    # A shell inside a step (`srun --pty bash`) inherits the binding and layout of that step, and --export=NONE, which would
    # hide our variables from the ranks.
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_MEM_BIND", "SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_TYPE", "SLURM_MEM_BIND_VERBOSE"),
    *("SLURM_GPU_BIND", "SLURM_DISTRIBUTION", "SLURM_EXPORT_ENV"),
    # A user's shell may have others. They limit a step, give it other resources or place it elsewhere ...
    *("SLURM_TIMELIMIT", "SLURM_WAIT", "SLURM_IMMEDIATE", "SLURM_NO_KILL", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_OVERLAP"),
    *("SLURM_OVERCOMMIT", "SLURM_GRES", "SLURM_GRES_FLAGS", "SLURM_STEP_GRES", "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_SOCKET"),
    *("SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_TRES_BIND"),
    *("SLURM_NCORES_PER_SOCKET", "SLURM_NSOCKETS_PER_NODE", "SLURM_CORE_SPEC", "SLURM_THREAD_SPEC", "SLURM_CONSTRAINT"),
    *("SLURM_HOSTFILE", "SLURM_SPREAD_JOB", "SLURM_USE_MIN_NODES", "SLURM_DEPENDENCY", "SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"),
    # ... or change what a step runs, where, and where its output goes.
    *("SLURM_CONTAINER", "SRUN_CONTAINER", "SLURM_BCAST", "SLURM_WORKING_DIR", "SLURM_REMOTE_CWD", "SLURM_LABELIO"),
    *("SLURM_OPEN_MODE", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
)
"""Variables that srun reads as options. Each step has explicit options instead.

Left out: variables that describe the job or its site (SLURM_JOB_*, SLURM_CONF, SLURM_MPI_TYPE, SLURM_TASK_PROLOG ...), and
SLURM_HINT and SLURM_THREADS_PER_CORE, which sbatch reads or sets for the whole job.
"""


def unset_for_sbatch() -> list[str]:
    """Return the `env` command, to put before sbatch, that hides SBATCH_* variables from it, except those of `PASSED`.

    The command also hides the variables of a surrounding heterogeneous salloc: sbatch exports its environment to the job, and a
    plain job would take these variables for its own.
    """
    around = [name for name in os.environ if name == "SLURM_HET_SIZE" or "_HET_GROUP_" in name]
    return ["env", *(f"--unset={name}" for name in [*_of_sbatch(), *around])]


def unset_for_steps() -> str:
    """Return the `env` command, to put before srun, that hides `STEP_VARIABLES` from it."""
    return f"env {' '.join(f'-u {name}' for name in STEP_VARIABLES)}"


def _of_sbatch() -> list[str]:
    return sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in PASSED)


def wishes() -> dict[str, str]:
    """Return option -> value for the options of WISHES that environment variables set."""
    return {name: value for name in WISHES if (value := os.environ.get(variable(name)))}


def export_wishes() -> str:
    """Return bash lines that set the variables of `wishes`, for the script of a job that itself submits jobs."""
    return "".join(f"export {variable(name)}={shlex.quote(value)}\n" for name, value in wishes().items())


def variable(option: str) -> str:
    """Return the name of the variable of an option of WISHES: partition -> SBATCH_PARTITION."""
    return f"SBATCH_{option.upper()}"


def chosen_wishes(host: ComponentConfig) -> dict[str, str]:
    """Return the options of `wishes` that a component takes, because its recipe does not set them."""
    return {
        name: value for name, value in wishes().items() if not getattr(host, name, None) and name not in host.sbatch_options
    }


def with_wishes(host: ComponentConfig) -> ComponentConfig:
    """Return a component with the options of `chosen_wishes` as its own."""
    taken, keys = chosen_wishes(host), {field.name for field in fields(host)}
    attributes = {name: value for name, value in taken.items() if name in keys}
    return replace(
        host, **attributes, sbatch_options={**host.sbatch_options, **{k: v for k, v in taken.items() if k not in keys}}
    )


def notes(hosts: dict[str, ComponentConfig]) -> Iterator[str]:
    """Yield a note on the effect of each of Slurm's environment variables. hosts: the components with nodes of their own."""
    for name, value in wishes().items():
        takers = [f"cluster.{component}" for component, host in hosts.items() if name in chosen_wishes(host)]
        what = f"{variable(name)}={value} from the environment"
        yield f"{what}: used for {' and '.join(takers)}" if takers else f"{what}: not used, because the recipe sets {name}"
    known = {variable(name) for name in WISHES}
    for name in _of_sbatch():
        if name not in known:
            yield f"{name}={os.environ[name]} from the environment: not used, because {_instead(name)}"
    if "SLURM_JOB_ID" not in os.environ and (step_variables := [name for name in STEP_VARIABLES if name in os.environ]):
        yield f"{', '.join(step_variables)} from the environment: not used, because the recipe sets options of the job's steps"


def _instead(name: str) -> str:
    """Return why sbatch does not get a variable, with the recipe's key that has the same effect, if there is one."""
    plain = name.removeprefix("SBATCH_").lower().replace("_", "-")
    option = OPTIONS.get(plain, plain)
    if option in REFUSED:
        return REFUSED[option]
    if option in OF_A_COMPONENT:
        return f"{OF_A_COMPONENT[option]} of a component sets this option"
    if option in OF_THE_JOB:
        return f"{OF_THE_JOB[option]} sets this option"
    instead = f". Try cluster.sbatch_options={{{option}: VALUE}}" if OPTION.fullmatch(option) else ""
    return f"only the recipe sets options of sbatch{instead}"
