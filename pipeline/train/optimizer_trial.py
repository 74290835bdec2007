"""Try an optimizer on small tensors, before weights are loaded, and in plans before a job.

`python -m pipeline.train.optimizer_trial REPLY` reads {folders, sharded, gpus, name, kwargs} as JSON from stdin, and writes
{device, problems: [[key, code, message]], bytes: [of a matrix, of other parameters] per element} as JSON into the file REPLY.
It imports the optimizer's module, which may be a user's.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from pipeline.boxes import Piece, whole
from pipeline.config import OptimizerConfig, Problem, RecipeError
from pipeline.recipe import user_code
from pipeline.train.checkpoint_state import optimizer_entries
from pipeline.train.optimizer import KEY, build_optimizer, construct, resolve_optimizer
from pipeline.train.shards import local

SIZE = 4
"""The size of each dimension of a stand-in on each rank."""


def stand_ins(parameters: Iterable[nn.Parameter], device: torch.device) -> list[nn.Parameter]:
    """Return small parameters of ones: one for each number of dimensions and each way in which ranks hold `parameters`."""
    kinds = {}
    for parameter in parameters:
        sharding = (parameter.device_mesh, tuple(parameter.placements)) if isinstance(parameter, DTensor) else None
        kinds[parameter.dim(), sharding] = parameter.dtype
    found = []
    for (dims, sharding), dtype in kinds.items():
        tensor = torch.ones((SIZE,) * dims, dtype=dtype, device=device)
        if sharding is not None:
            mesh, placements = sharding
            shape = list(tensor.shape)
            for dim, placement in enumerate(placements):
                if not isinstance(placement, Replicate):
                    shape[placement.dim] *= mesh.size(dim)
            stride = torch.empty(shape, device="meta").stride()
            tensor = DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
        found.append(nn.Parameter(tensor))
    return found


def try_optimizer(
    config: OptimizerConfig, parameters: Sequence[nn.Parameter], device: torch.device | None = None
) -> tuple[float, float]:
    """Take a step on `parameters`, and return the bytes of its state per element of (matrices, vectors).

    Collective over the ranks that hold the parameters. Raises RecipeError if the optimizer cannot be built, cannot update the
    parameters, or has state that checkpoints cannot store.
    """
    cls = resolve_optimizer(config)

    def step(kwargs: dict) -> torch.optim.Optimizer:
        optimizer = build_optimizer(OptimizerConfig(config.name, kwargs), parameters, device=device)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    build_optimizer(config, parameters, device=device)  # which names the option at fault
    try:
        optimizer = construct(f"{KEY}.kwargs", cls, config.kwargs, step)
    except RecipeError as error:
        if error.problems[0].key != f"{KEY}.kwargs":
            raise
        cause = error.__cause__
        what = f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        message = f"got {config.name}, which cannot update the model's parameters: {what}. Try torch.optim.AdamW"
        raise RecipeError(Problem(f"{KEY}.name", "unsupported", message)) from cause
    pieces: dict[torch.Tensor, list[Piece]] = {
        p: [Piece(f"w{i}", whole(tuple(p.shape)), whole(tuple(p.shape)))] for i, p in enumerate(parameters)
    }
    list(optimizer_entries(optimizer, pieces, {f"w{i}": tuple(p.shape) for i, p in enumerate(parameters)}))
    of_matrices, of_vectors = ([p for p in parameters if (p.dim() > 1) == matrices] for matrices in (True, False))
    return _bytes(optimizer, of_matrices), _bytes(optimizer, of_vectors)


def _bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> float:
    """Return the bytes of state per element, without scalars."""
    held = [local(v) for p in parameters for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v) and v.dim()]
    return sum(tensor.nbytes for tensor in held) / max(1, sum(math.prod(local(p).shape) for p in parameters))


def in_world_of_one(config: OptimizerConfig, sharded: bool, device: str = "cpu") -> tuple[float, float]:
    """Try the optimizer on a matrix and a vector in this process, and return the result of `try_optimizer`.

    sharded: on DTensors, which needs a process without a process group.
    """
    tensors = [torch.ones(SIZE, SIZE, device=device), torch.ones(SIZE, device=device)]
    if not sharded:
        return try_optimizer(config, [nn.Parameter(tensor) for tensor in tensors])
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,), mesh_dim_names=("shard",))
        return try_optimizer(config, [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in tensors])
    finally:
        dist.destroy_process_group()


def main(reply: str) -> None:
    """Try the optimizer of the request on stdin, and write the reply."""
    request = json.load(sys.stdin)
    user_code.search_in(request["folders"])
    device = "cuda" if request["gpus"] and torch.cuda.is_available() else "cpu"
    answer = {"device": device, "problems": [], "bytes": None}
    try:
        answer["bytes"] = in_world_of_one(OptimizerConfig(request["name"], request["kwargs"]), request["sharded"], device)
    except RecipeError as error:
        answer["problems"] = [(problem.key, problem.code, problem.message) for problem in error.problems]
    Path(reply).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
