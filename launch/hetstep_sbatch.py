"""Run a recipe in the surrounding batch job, for launch/hetstep.sbatch; the variables of NeMo-RL's ray.sub are supported.

A variable with an equivalent here becomes overrides of the recipe, unless the command line sets their keys. For each other
variable that is set, a note says why it has no effect. See https://github.com/NVIDIA-NeMo/RL/blob/main/ray.sub
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from launch import submit
from launch.executors.allocation import batch_job
from launch.recipes import reading
from launch.terminal import command_line
from pipeline import config

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

COMPONENTS = ("train", "generate", "reward", "judge")
OPTIONAL = ("cluster.reward.", "cluster.judge.")  # of components that most runs lack
NO_EFFECT = {
    "COMMAND": "not used; the command line names the recipe that runs: recipe=NAME key=value ...",
    "SETUP_COMMAND": "not used; no command runs in the containers before the ranks. Put the setup into the images",
    "BASE_LOG_DIR": "not used; logs are in attempts/ of the run folder. Set the run folder with run_dir=...",
    "UV_CACHE_DIR_OVERRIDE": "not used; ranks use the packages of the image, without uv",
    "DEDICATED_RAY_HEAD": "not used; without Ray no node is reserved for a head. Rank 0 is a train rank",
    "RAY_LOG_SYNC_FREQUENCY": "not used; there are no Ray logs. Ranks write logs into the run folder",
    "SANDBOX_CONTAINER": "not used; no sandbox container is started. Environments run in the job itself",
}


def translated(environment: Mapping[str, str], arguments: list[str], shares_nodes: bool = False) -> tuple[list[str], list[str]]:
    """Return (overrides to put before `arguments`, notes to print), made from the variables of NeMo-RL's ray.sub.

    shares_nodes: whether components divide the GPUs of a node. Then GPUS_PER_NODE gives no override, because each component has
    its own part.
    """
    values: dict[str, object] = {}
    lines = []
    if container := environment.get("CONTAINER"):
        values |= {"container_image": container, "python": "python3"}
        if folder := environment.get("SLURM_SUBMIT_DIR"):
            values["container_workdir"] = folder
    if mounts := environment.get("MOUNTS"):
        values["container_mounts"] = json.dumps([mount for mount in mounts.split(",") if mount])
    if gpus := environment.get("GPUS_PER_NODE"):
        if shares_nodes:
            lines.append("GPUS_PER_NODE: not used; with cluster.share_nodes=true set gpus_per_node of every component")
        else:
            values["gpus_per_node"] = gpus
    if cpus := environment.get("CPUS_PER_WORKER"):
        if gpus and gpus.isdigit() and int(gpus) and cpus.isdigit():
            values["cpus_per_task"] = max(1, int(cpus) // int(gpus))
        else:
            lines.append(
                "CPUS_PER_WORKER: not used; expected CPUS_PER_WORKER and GPUS_PER_NODE as whole numbers, GPUS_PER_NODE above 0"
            )
    given = [argument.partition("=")[0] for argument in arguments]
    overrides = []
    for component in COMPONENTS:
        for key, value in values.items():
            name = f"cluster.{component}.{key}"
            if not any(name == key or name.startswith(f"{key}.") for key in given):
                overrides.append(f"{name}={value}")
    lines += [f"{override}, from the environment, as in ray.sub" for override in overrides if not override.startswith(OPTIONAL)]
    lines += [f"{name}: {why}" for name, why in NO_EFFECT.items() if environment.get(name)]
    return overrides, lines


def shares_nodes(arguments: list[str]) -> bool:
    """Return whether the recipe's components divide the GPUs of each node. `submit` reports the recipe's problems."""
    try:
        request = command_line.parse(submit.SubmitRequest, arguments)
        return request.recipe is not None and reading.inspect(request.recipe, request.overrides).recipe.cluster.share_nodes
    except config.RecipeError:
        return False


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    why = ""
    if batch_job() is None:
        why = "launch/hetstep_sbatch.py runs only in `sbatch launch/hetstep.sbatch recipe=...`. Try launch/submit.py"
    elif "detach=true" in arguments:
        why = "detach: got true; expected false, because the job ends with its batch script, which sbatch has detached"
    if why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR2, lambda *_: None)  # until there are ranks; they would inherit SIG_IGN
    overrides, lines = translated(os.environ, arguments, shares_nodes(arguments))
    for line in lines:
        print(f"# {line}", flush=True)
    chosen = [] if any(argument.startswith("cluster.executor=") for argument in arguments) else ["cluster.executor=allocation"]
    return submit.main([*chosen, *overrides, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
