"""Convert a Hugging Face checkpoint once to whole Megatron parameters, in a folder that jobs share.

The ranks of the train component divide the parameters and convert one at a time, so a rank's memory is bounded by the largest
parameter (its sources and the result), not by the model. `conversion_cache.py` stores conversions and locks them between jobs.
`fingerprint.py` identifies checkpoints.

The conversion of a model with a value head contains only its body, because the checkpoint may not have the head yet.

Not supported: quantized checkpoints. Conversions do not depend on the layout: each rank reads its boxes of whole parameters.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import constants
from transformers import PreTrainedConfig

from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.files.storage import NO_RETRIES, retrying
from pipeline.models import family
from pipeline.models.family import VALUE_HEAD, Parameter, unsupported_model
from pipeline.models.hugging_face import checkpoint_shapes
from pipeline.models.weight_files import FLOATS, TensorEntry, WeightFiles
from pipeline.train.initial_weights import checkpoint_files, initial_weights
from pipeline.train.megatron.collectives import on_all_ranks, on_first_rank
from pipeline.train.megatron.conversion_cache import VARIABLE, Conversion, ConversionCache, unusable_folder
from pipeline.train.megatron.fingerprint import content_digests, fingerprint
from pipeline.train.tensor_files import DTYPES, load_tensor, write_tensors
from pipeline.train.train_backend import Phase
from pipeline.types import Head


def shared_folder() -> Path:
    """Return the folder of converted checkpoints that environment variables name; without one, `hetstep` in HF_HOME."""
    for variable in (VARIABLE, "NRL_MEGATRON_CHECKPOINT_DIR"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    return Path(constants.HF_HOME) / "hetstep"  # ~/.cache/huggingface without HF_HOME and XDG_CACHE_HOME


def open_conversion(
    policy: PolicyConfig,
    config: PreTrainedConfig,
    group: dist.ProcessGroup,
    head: Head = "logprobs",
    folder: Path | None = None,
    timeout_s: float = 3600.0,
    phase: Phase = contextlib.nullcontext,
) -> Conversion:
    """Return the conversion of the checkpoint `policy.model_name`, after converting it if necessary. Collective.

    config: the checkpoint's configuration with the recipe's overrides. folder: the folder of conversions, which all ranks
    share; None: `shared_folder()`. timeout_s: how long to wait for another job that converts the same checkpoint. phase:
    reports waiting and converting.

    Raises RecipeError if the checkpoint is not of this model or the folder cannot be used, TimeoutError if another job's
    conversion takes too long.
    """
    if getattr(config, "quantization_config", None):
        raise unsupported_model(f"{policy.model_name} is quantized; expected an unquantized checkpoint")
    root = folder or shared_folder()
    files = checkpoint_files(policy.model_name)
    parameters = family(config.model_type).parameters(config, head)
    parameters.pop(VALUE_HEAD, None)
    on_first_rank(group, lambda: _prepare(root))
    paths = list(files.files.values())
    digests = content_digests(paths, root / "digests", group)
    of_file = dict(zip(paths, digests, strict=True))
    chosen = {name: of_file[stored.path] for name, stored in files.tensors.items()} if files.copied else {}
    identity = on_first_rank(group, lambda: fingerprint(digests, parameters, checkpoint_shapes(config, head)[0], chosen))
    cache = ConversionCache(root, policy.model_name, identity)
    with contextlib.ExitStack() as stack:
        path = on_first_rank(group, cache.find)
        if not path:
            with phase("wait for another job's conversion"):
                on_first_rank(group, lambda: stack.enter_context(cache.lock(timeout_s)))
            path = on_first_rank(group, cache.find)  # another job may have converted it meanwhile
        if not path:
            with phase("convert the checkpoint"):
                on_first_rank(group, lambda: _check(policy, config, head))
                partial = Path(on_first_rank(group, cache.begin))
                on_all_ranks(group, lambda: _write_part(partial, files, parameters, group.rank(), group.size()))
                path = on_first_rank(group, lambda: cache.commit(partial, parameters.keys()))
        opened: list[Conversion] = []
        on_all_ranks(group, lambda: opened.append(_open(Path(path))))
    return opened[0]


def _prepare(root: Path) -> None:
    """Create the shared folder, and check that it is writable."""
    try:
        (root / "digests").mkdir(parents=True, exist_ok=True)
        for folder in (root, root / "digests"):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise unusable_folder(root, error) from error


def _check(policy: PolicyConfig, config: PreTrainedConfig, head: Head) -> None:
    """Raise RecipeError if the checkpoint's names or shapes are not the model's, or if its tied tensors differ."""
    initial_weights(policy, config, seed=0, head=head)


def _write_part(partial: Path, files: WeightFiles, parameters: Mapping[str, Parameter], rank: int, size: int) -> None:
    """Convert this rank's part of the parameters into a separate file."""
    _check_visible(partial)
    stored = files.tensors
    for name, entry in stored.items():
        if entry.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {entry.dtype}; expected {', '.join(FLOATS)}. Is it quantized?")
    mine = _partition(parameters, stored, rank, size)
    if not mine:
        return

    read: dict[tuple[str, ...], list[torch.Tensor]] = {}  # the last sources: experts of one tensor follow one another

    def make(name: str) -> torch.Tensor:
        parameter = parameters[name]
        if parameter.sources not in read:
            read.clear()
            read[parameter.sources] = [load_tensor(stored[source]) for source in parameter.sources]
        return parameter.function(*read[parameter.sources])

    def shaped(name: str) -> torch.Tensor:
        entries = [stored[source] for source in parameters[name].sources]
        return parameters[name].function(
            *(torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for entry in entries)
        )

    results = {name: shaped(name) for name in mine}
    path = partial / f"rank{rank:05d}.safetensors"

    def write() -> None:
        try:
            write_tensors(results, path, make=make)
        except OSError:
            path.unlink(missing_ok=True)  # the partial file may be what fills the disk
            raise

    retrying(write, f"converting the checkpoint for Megatron-Core ({VARIABLE})", path, NO_RETRIES)


def _partition(parameters: Mapping[str, Parameter], stored: Mapping[str, TensorEntry], rank: int, size: int) -> list[str]:
    """Return the names of the parameters of part `rank`, of `size` parts with about equal bytes, in the model's order."""
    sizes = {name: sum(stored[source].nbytes for source in parameter.sources) for name, parameter in parameters.items()}
    total, before, part = sum(sizes.values()), 0, []
    for name, nbytes in sizes.items():
        if before * size // total == rank:
            part.append(name)
        before += nbytes
    return part


def _open(folder: Path) -> Conversion:
    _check_visible(folder)
    return Conversion(folder)


def _check_visible(folder: Path) -> None:
    """Raise RecipeError if this node does not share the folder with the first rank's node."""
    # The parent is listed because NFS clients cache that a single name does not exist.
    if not folder.parent.is_dir() or folder.name not in os.listdir(folder.parent):
        host = socket.gethostname()
        message = f"got {folder}, which exists on the first train rank's node but not on {host}; expected a shared folder"
        raise RecipeError(Problem(VARIABLE, "file-not-found", message))
