"""Note the work that a run in containers loses if pyxis mounts images with squashfuse and Slurm's signals reach it.

With use_squashfuse=1 the root file system of a step's ranks depends on other processes of that step (enroot's
src/runtime.sh). Where Slurm signals all processes of a step, and not only its tasks, SIGTERM ends these processes and the
ranks. A signal to save and leave therefore goes to the batch script alone, see launch/executors/batch.sh. Slurm itself still
sends SIGTERM to the steps when it ends a job.
https://github.com/NVIDIA/pyxis, https://slurm.schedmd.com/cgroup.conf.html (SignalChildrenProcesses)
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from launch.executors.slurm_client import Fields

TRUE = ("1", "y", "yes", "on", "true")
DEPTH = 4  # of includes


def notes(keys: list[str], config: Fields) -> Iterator[str]:
    """Yield a note if pyxis mounts images with squashfuse here and a signal to a step reaches squashfuse's processes.

    keys: the recipe's keys of images. config: Slurm's configuration.
    """
    setting = _squashfuse_setting(config.get("PlugStackConfig", "/etc/slurm/plugstack.conf"))
    if setting is None or not signals_reach_children(config):
        return
    losing = ["scancel", "scontrol requeue"]
    remedy = ""
    if config.get("PreemptMode", "OFF") != "OFF" and not sends_user_signal(config):
        losing.append("preemption")
        parameter = "PreemptParameters=" if "PreemptParameters" in config else "SlurmctldParameters=preempt_"
        remedy = f" Slurm's administrators can set {parameter}send_user_signal. Then a run saves at preemption with GraceTime."
    yield (
        f"{', '.join(keys)}: pyxis mounts images with squashfuse here ({setting}), and SIGTERM to a step ends squashfuse."
        f" {', '.join(losing[:-1])} and {losing[-1]} lose all training steps after the last checkpoint;"
        " checkpointing.save_period limits the loss."
        f" A run saves at its time limit and after `scancel --batch --signal=USR2 JOB`.{remedy}"
    )


def signals_reach_children(config: Fields) -> bool:
    """Return whether a signal to a step reaches more than its tasks. With cgroups, this depends on cgroup.conf."""
    if config.get("ProctrackType", "proctrack/cgroup") != "proctrack/cgroup":
        return True
    return config.get("SignalChildrenProcesses", "no").lower() in TRUE


def sends_user_signal(config: Fields) -> bool:
    """Return whether preemption begins with the signal of the job's --signal.

    The setting is in PreemptParameters; before Slurm 23.02 it was in SlurmctldParameters.
    """
    parameters = f"{config.get('PreemptParameters', '')},{config.get('SlurmctldParameters', '')}"
    return "send_user_signal" in parameters.lower()


def _squashfuse_setting(plugstack: str) -> str | None:
    """Return `use_squashfuse=1 in FILE` from a readable plugstack.conf that enables it, else None."""
    for path, words in _lines(plugstack, DEPTH):
        for word in words:
            key, _, value = word.partition("=")
            if key == "use_squashfuse" and value.lower() in TRUE and "pyxis" in words[1]:
                return f"use_squashfuse={value} in {path}"
    return None


def _lines(pattern: str, depth: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (file, words of a line) of a plugstack.conf and of the files that it includes."""
    for path in sorted(glob.glob(pattern)):
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            words = line.split("#")[0].split()
            if len(words) > 1 and words[0] == "include" and depth:
                yield from _lines(str(Path(path).parent / words[1]), depth - 1)
            elif len(words) > 2:
                yield path, words
