"""Run a recipe in the batch job around us, as launch/hetstep.sbatch does, also with the variables of NeMo-RL's ray.sub.

Variables that mean the same here become overrides of the recipe, unless the command line gives the key. For each of the others
that is set, a line says why it does nothing.
See https://github.com/NVIDIA-NeMo/RL/blob/main/ray.sub
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of launch/: whether or not the package is installed

COMPONENTS = ("train", "generate", "reward")
NOT_HERE = {
    "COMMAND": "the recipe on this command line is what runs: recipe=NAME key=value ...",
    "SETUP_COMMAND": "nothing is run in the containers before the ranks; what it sets up belongs into the images",
    "BASE_LOG_DIR": "logs are in the run folder, attempts/; run_dir=... puts that elsewhere",
    "UV_CACHE_DIR_OVERRIDE": "there is no uv; ranks use what is installed in the image",
    "DEDICATED_RAY_HEAD": "there is no Ray, so no node is set aside for its head; rank 0 is one of the train ranks",
    "RAY_LOG_SYNC_FREQUENCY": "there are no Ray logs; ranks write theirs into the run folder",
    "SANDBOX_CONTAINER": "no sandbox is started beside the ranks; environments run on the generate ranks",
}


def understood(environment: Mapping[str, str], arguments: list[str], shares_nodes: bool = False) -> tuple[list[str], list[str]]:
    """Return (overrides to go before `arguments`, lines to be printed).

    shares_nodes: components divide the GPUs of a node, so each has its own part of GPUS_PER_NODE.
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
            lines.append("GPUS_PER_NODE: not used; with cluster.share_nodes=true each component has its own gpus_per_node")
        else:
            values["gpus_per_node"] = gpus
    if cpus := environment.get("CPUS_PER_WORKER"):
        if gpus and gpus.isdigit() and int(gpus) and cpus.isdigit():
            values["cpus_per_task"] = max(1, int(cpus) // int(gpus))
        else:
            lines.append("CPUS_PER_WORKER: not used; it is shared among the ranks of a node by GPUS_PER_NODE, which is not set")
    given = [argument.partition("=")[0] for argument in arguments]
    overrides = []
    for component in COMPONENTS:
        for key, value in values.items():
            name = f"cluster.{component}.{key}"
            if not any(name == key or name.startswith(f"{key}.") for key in given):
                overrides.append(f"{name}={value}")
    lines += [f"{override}, from the environment, as ray.sub has it" for override in overrides if ".reward." not in override]
    lines += [f"{name}: {why}" for name, why in NOT_HERE.items() if environment.get(name)]
    return overrides, lines


def shares_nodes(arguments: list[str]) -> bool:
    """Return whether the recipe's components divide the GPUs of each node. What is wrong with it is told by `submit`."""
    from launch import command_line, recipes, submit
    from pipeline import config

    try:
        request = command_line.parse(submit.SubmitRequest, arguments)
        return request.recipe is not None and recipes.inspect(request.recipe, request.overrides).recipe.cluster.share_nodes
    except config.RecipeError:
        return False


def main(arguments: list[str]) -> int:
    from launch import submit
    from launch.executors.allocation import batch_job

    why = ""
    if batch_job() is None:
        why = "launch/ray_sub.py is run by `sbatch launch/hetstep.sbatch recipe=...`; else launch/submit.py"
    elif "detach=true" in arguments:
        why = "detach: the job ends when its batch script does; sbatch has detached it already"
    if why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGUSR2, lambda *_: None)  # until there are ranks to be told; not SIG_IGN, which they would inherit
    overrides, lines = understood(os.environ, arguments, shares_nodes(arguments))
    for line in lines:
        print(f"# {line}", flush=True)
    chosen = [] if any(argument.startswith("cluster.executor=") for argument in arguments) else ["cluster.executor=allocation"]
    return submit.main([*chosen, *overrides, *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
