"""The contents of a checkpoint: boxes of weights and optimizer state under Hugging Face names, and states of generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.boxes import Piece, whole
from pipeline.config import LoRAConfig, Problem, RecipeError
from pipeline.models.frozen_names import KEY as FROZEN_KEY
from pipeline.models.recorded_layout import Shape, copy_pieces, restrict
from pipeline.train.adapters.adapter_weights import KEY as LORA_KEY
from pipeline.train.adapters.spec import PREFIX, layer_of
from pipeline.train.shards import BoxReader, Entry, local, local_box


def schedule_steps(record: dict[str, Any]) -> int:
    """Return the number of steps of a saved schedule.

    Earlier versions advanced the schedule with every optimizer update and stored the number of updates as "steps". A run cannot
    resume from such a checkpoint if it had several updates per step: see `pipeline.checkpoints.checkpoint.version_problem`.
    """
    return record["schedule"] if "schedule" in record else record["steps"]


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of the parameter groups, as JSON values: tuples become lists.

    If not all groups share their options, those of the first, and under `other_groups` those of the others.
    """
    groups = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    first, *others = [group for number, group in enumerate(groups) if group not in groups[:number]]
    return first | ({"other_groups": others} if others else {})


def stored_name(name: str, state: str = "") -> str:
    """Return the name in our checkpoints of a tensor on disk, or of the optimizer's `state` of it."""
    return f"optimizer.{state}.{name}" if state else (PREFIX if layer_of(name) else "model.") + name


def entries(part: torch.Tensor, pieces: Iterable[Piece], shapes: Mapping[str, Shape], state: str = "") -> Iterator[Entry]:
    """Yield a tensor as boxes of tensors on disk, with their `stored_name`.

    pieces: the pieces of tensors on disk that `part` consists of. shapes: {name: shape} of the tensors on disk.
    """
    for piece in pieces:
        box = part[piece.target.within(whole(tuple(part.shape)))].reshape(piece.source.size)
        yield stored_name(piece.name, state), shapes[piece.name], piece.source, box


def optimizer_entries(
    optimizer: torch.optim.Optimizer, pieces: Mapping[torch.Tensor, list[Piece]], shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    """Yield the optimizer's state of the parameters in `pieces` as `optimizer.<state>.<name on disk>`.

    A state is either cut like its parameter or a scalar. A scalar belongs to the parameter in memory, so it occurs once, under
    the name of the parameter's first tensor on disk. Raises RecipeError for a state of another shape.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if value is None:
                continue
            if not _is_plain(value) or (value.shape != parameter.shape and value.dim()):
                message = (
                    f"the state '{key}' of {type(optimizer).__name__} is neither a tensor shaped like the parameter nor a"
                    " scalar, so checkpoints cannot store it. Try torch.optim.AdamW"
                )
                raise RecipeError(Problem("policy.optimizer.name", "unsupported", message))
            if parameter not in pieces:
                continue
            if value.shape == parameter.shape:
                yield from entries(local(value), restrict(pieces[parameter], local_box(value)), shapes, key)
            else:
                yield stored_name(pieces[parameter][0].name, key), (), whole(()), value


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of plain numbers, whole or sharded; not, for example, a quantized state."""
    return isinstance(value, torch.Tensor) and type(local(value)) in (torch.Tensor, torch.nn.Parameter)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    pieces: Mapping[torch.Tensor, list[Piece]],
    shapes: Mapping[str, Shape],
    reader: BoxReader,
) -> None:
    """Load the optimizer's state from a checkpoint into a new optimizer. pieces, shapes: as for `optimizer_entries`."""
    kinds: dict[str, list[str]] = {}
    for name in reader.shapes:
        if name.startswith("optimizer."):
            _, kind, tensor_name = name.split(".", 2)
            kinds.setdefault(tensor_name, []).append(kind)
    state = {}
    # in the order in which `load_state_dict` numbers them
    for number, parameter in enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]):
        first = pieces[parameter][0].name
        state[number] = {}
        for kind in kinds.get(first, []):
            if reader.shapes[stored_name(first, kind)] == shapes[first]:
                value = torch.empty_like(parameter)
                load_entries(value, pieces[parameter], reader, kind)
            else:
                value = reader.read(stored_name(first, kind), whole(())).clone()  # otherwise the file stays mapped
            state[number][kind] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_entries(tensor: torch.Tensor, pieces: list[Piece], reader: BoxReader, state: str = "") -> None:
    """Fill this rank's part of a tensor from saved `entries`, which ranks of any layout may have written."""
    pieces = restrict(pieces, local_box(tensor))
    copy_pieces(local(tensor), pieces, lambda name, box: reader.read(stored_name(name, state), box))


# ---- checks -------------------------------------------------------------------------------------------------------------


def check_tensors(folder: Path, reader: BoxReader, shapes: Mapping[str, Shape]) -> None:
    """Raise RecipeError unless the checkpoint in `folder` has the tensors on disk with these shapes, by name, and no others."""
    expected = {stored_name(name): tuple(shape) for name, shape in shapes.items()}
    stored = {name: tuple(shape) for name, shape in reader.shapes.items() if name.startswith(("model.", PREFIX))}
    if stored != expected:
        raise other_model(folder, stored, expected)


def other_model(folder: Path, stored: Mapping[str, Shape], expected: Mapping[str, Shape | None]) -> RecipeError:
    """Return the error for a checkpoint in `folder` whose tensors `stored` differ from the tensors of policy.model_name."""
    wrong = sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
    message = f"{folder} is a checkpoint of another model; {len(wrong)} tensors differ, first {wrong[:4]}"
    return RecipeError(Problem("policy.model_name", "contradiction", message))


def adapter_record(config: LoRAConfig, random_seed: int | None) -> dict[str, Any]:
    """Return what a checkpoint records of its adapters besides their tensors. random_seed: the seed of W if W is random."""
    options = {"use_dora": True} if config.use_dora else {}
    options |= {"use_rslora": True} if config.use_rslora else {}
    return {"dim": config.dim, "alpha": config.alpha, "random_seed": random_seed, **options}


def check_record(folder: Path, record: Mapping[str, Any], adapters: Mapping[str, Any] | None, frozen: Sequence[str]) -> None:
    """Raise RecipeError if the checkpoint in `folder`, with this record, has other adapters or other frozen parameters.

    adapters: the recipe's `adapter_record`; None: no adapters. frozen: policy.freeze_parameters.
    """
    if (theirs := record.get("lora")) != adapters:
        old, new = dict(theirs or {}), dict(adapters or {})
        changes = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in old | new if old.get(k) != new.get(k))
        message = f"{folder} was saved with other adapters, or for weights of another random seed: {changes}"
        raise RecipeError(Problem(LORA_KEY, "contradiction", message))
    if (theirs := record.get("frozen", [])) != list(frozen):
        message = (
            f"got {list(frozen)}, but {folder} was saved with {theirs}: its optimizer state is of other parameters. Try"
            " another run_dir that starts from its weights (python launch/export.py)"
        )
        raise RecipeError(Problem(FROZEN_KEY, "contradiction", message))


# ---- random generators --------------------------------------------------------------------------------------------------


def seed_generators(seed: int, data_rank: int) -> None:
    """Seed the generators of torch (of the CPU and of GPUs), Python and numpy.

    Random numbers of a model then differ between data-parallel ranks and are the same on ranks that share their data, as tensor
    parallelism requires. Checkpoints keep the generators' states.
    """
    rank_seed = int(np.random.SeedSequence([seed % (1 << 64), data_rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(rank_seed)
    random.seed(rank_seed)
    np.random.seed(rank_seed % (1 << 32))


def random_entries(device: torch.device, rank: int) -> Iterator[Entry]:
    """Yield the states of torch's generators, with names that contain the rank."""
    states = {f"random.torch.{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state(device)
    for name, state in states.items():
        yield name, tuple(state.shape), whole(tuple(state.shape)), state


def random_record() -> dict[str, Any]:
    """Return the states of Python's and numpy's generators, as JSON values."""
    version, words, gauss = random.getstate()
    state = np.random.get_state()
    assert isinstance(state, tuple)  # a dict only with legacy=False
    kind, keys, *fields = state
    return {"python": [version, list(words), gauss], "numpy": [kind, keys.tolist(), *fields]}


def load_random(device: torch.device, rank: int, reader: BoxReader, record: dict[str, Any]) -> None:
    """Restore the states of all generators. record: the result of `random_record` of the same rank."""
    for kind in ("torch", "cuda") if device.type == "cuda" else ("torch",):
        name = f"random.{kind}.{rank}"
        state = reader.read(name, whole(reader.shapes[name]))
        torch.set_rng_state(state) if kind == "torch" else torch.cuda.set_rng_state(state, device)
    version, words, gauss = record["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *fields = record["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *fields))
