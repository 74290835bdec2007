"""What a checkpoint holds besides the weights: optimizer state as named tensors, and the state of the random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pipeline.train.shards import BoxReader, local, local_box, whole


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What all parameter groups have in common, as JSON has it; tuples become lists."""
    group = optimizer.param_groups[0]
    return {name: list(value) if isinstance(value, tuple) else value for name, value in group.items() if name != "params"}


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]) -> dict[str, torch.Tensor]:
    """`optimizer.<state>.<parameter>` -> tensor: of the parameter's shape and cut like it, or a scalar.

    Raises ValueError for an optimizer with other state.
    """
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or (value.shape != parameter.shape and value.dim()):
                raise ValueError(
                    f"policy.optimizer.name: {type(optimizer).__name__} keeps '{key}' in a form that cannot be saved"
                )
            tensors[f"optimizer.{key}.{names[parameter]}"] = value
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], reader: BoxReader) -> None:
    """Give a fresh optimizer the state that `reader` has of it."""
    stored: dict[str, list[str]] = {}
    for name in reader.shapes:
        if name.startswith("optimizer."):
            _, key, parameter_name = name.split(".", 2)
            stored.setdefault(parameter_name, []).append(key)
    state = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        state[number] = {}
        for key in stored.get(names[parameter], []):
            name = f"optimizer.{key}.{names[parameter]}"
            if reader.shapes[name] == tuple(parameter.shape):
                value = torch.empty_like(parameter)
                local(value).copy_(reader.read(name, local_box(parameter)))
            else:
                value = reader.read(name, whole(()))
            state[number][key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """In the order in which `load_state_dict` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def random_tensors(device: torch.device, rank: int) -> dict[str, torch.Tensor]:
    """torch's generators, each rank's under a name of its own."""
    states = {f"random.torch.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    return states


def random_record() -> dict[str, Any]:
    """Python's and numpy's generators, as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return {"python": [version, list(words), gauss], "numpy": [kind, keys.tolist(), *rest]}


def load_random(device: torch.device, rank: int, reader: BoxReader, record: dict[str, Any]) -> None:
    for kind in ("torch", "cuda") if device.type == "cuda" else ("torch",):
        name = f"random.{kind}.{rank}"
        state = reader.read(name, whole(reader.shapes[name]))
        torch.set_rng_state(state) if kind == "torch" else torch.cuda.set_rng_state(state, device)
    version, words, gauss = record["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = record["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
