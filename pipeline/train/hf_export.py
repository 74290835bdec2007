"""Export a model as a Hugging Face checkpoint: sharded safetensors, the index, config, tokenizer, generation config, digests.

A model with a value head is exported as a sequence classifier with one label, because transformers loads it as such. Adapters
are merged into the weights that they adapt.

`export` reads from a running backend. `export_checkpoint` reads from a saved checkpoint and needs no ranks and no GPU. Tensors
stream one at a time, so memory is bounded by one shard file and one tensor.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.config import PolicyConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.stop_tokens import GENERATION, model_file, read_config, stop_tokens
from pipeline.files.digests import add_manifest
from pipeline.files.storage import NO_RETRIES, RetryPolicy, StorageError, errors_of_rust, retrying, sync, write_durably
from pipeline.files.stored_files import FileKey
from pipeline.models.hugging_face import meta_model, model_config
from pipeline.train.saved_weights import checkpoint_weights
from pipeline.train.tensor_files import write_tensors
from pipeline.train.train_backend import TrainBackend
from pipeline.types import Head

Result = TypeVar("Result")

SHARD_BYTES = 4 << 30
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files of multimodal models that say how pictures and sound become tensors; they do not change."""


def export(
    backend: TrainBackend,
    policy: PolicyConfig,
    folder: Path,
    writes: bool,
    head: Head = "logprobs",
    shard_bytes: int = SHARD_BYTES,
    retry: RetryPolicy = NO_RETRIES,
) -> dict[str, str]:
    """Write the backend's model, which has this head, to `folder`. Collective; only the rank with `writes` writes.

    Returns {path relative to the folder's parent: SHA-256} of the files; {} on other ranks. Raises StorageError if writing
    fails until `retry` ends.
    """
    if writes:
        written = write_model(backend.weights(model=True), policy, folder, head, shard_bytes, retry)
        return {f"{folder.name}/{name}": digest for name, digest in written.items()}
    for _ in backend.weights(model=True):  # gathering a full tensor needs every rank
        pass
    return {}


def export_checkpoint(
    checkpoint: Path,
    policy: PolicyConfig,
    folder: Path,
    head: Head = "logprobs",
    key: FileKey | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model in `checkpoint`, which any backend saved with any layout, to `folder`.

    Files are first written to `.<folder's name>.partial` next to it, so `folder` is always complete. key: decrypts an encrypted
    checkpoint; the export is not encrypted. Raises RecipeError if the checkpoint's model is not policy.model_name or the key
    does not fit, StorageError if the files cannot be written.
    """
    weights = checkpoint_weights(checkpoint, policy, head, key)
    with new_folder(folder) as partial:
        write_model(weights, policy, partial, head, shard_bytes)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, and rename it to `folder` at the end of the context.

    If writing fails, remove the new folder, and raise StorageError.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # an earlier attempt was killed
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
    except (OSError, StorageError) as error:  # the partial folder may be what fills the disk
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"writing {folder} failed: {error}") from error
    partial.rename(folder)
    sync(folder.parent)


def write_model(
    weights: Iterable[tuple[str, torch.Tensor]],
    policy: PolicyConfig,
    folder: Path,
    head: Head,
    shard_bytes: int,
    retry: RetryPolicy = NO_RETRIES,
) -> dict[str, str]:
    """Write the files that transformers and vLLM load: config and tokenizer, then weights in files of about `shard_bytes`.

    Returns {file name: SHA-256}, which digests.sha256 lists too.
    """

    def with_retries(work: Callable[[], Result]) -> Result:
        return retrying(work, "writing a Hugging Face checkpoint", folder, retry)

    def write_shard() -> None:
        digests.append(with_retries(lambda: write_tensors(shard, folder / f"{len(shards)}.partial")))
        shards.append(list(shard))

    digests: list[str] = []

    with_retries(lambda: _write_config(policy, folder, head))
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            write_shard()
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    write_shard()
    names = with_retries(lambda: _name_shards(folder, shards, total))
    return with_retries(lambda: add_manifest(folder, dict(zip(names, digests, strict=True))))


def _write_config(policy: PolicyConfig, folder: Path, head: Head) -> None:
    """Write config, tokenizer and generation config. The call can be repeated after it raises OSError."""
    config = model_config(policy, head)
    config.dtype = policy.precision
    config.architectures = config.architectures or [type(meta_model(config)).__name__]  # vLLM selects its model class by it
    folder.mkdir(parents=True, exist_ok=True)
    with errors_of_rust():
        config.save_pretrained(folder)
        load_tokenizer(policy.tokenizer).save_pretrained(folder)
    for name in PROCESSORS:
        if source := model_file(policy.model_name, name):
            shutil.copyfile(source, folder / name)
    if head == "logprobs":
        write_durably(folder / GENERATION, json.dumps(_generation_config(policy), indent=2) + "\n")
    for path in folder.iterdir():
        sync(path)


def _generation_config(policy: PolicyConfig) -> dict[str, Any]:
    """Return the model's generation config with all tokens that end a completion, including the one that training teaches.

    The config is read and written as JSON, because transformers refuses to save some configs that it loads.
    """
    source = model_file(policy.model_name, GENERATION)
    config = read_config(source) if source else {}
    stops = stop_tokens(policy)
    return {**config, "eos_token_id": stops.exported} if stops.tokens else config


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> list[str]:
    """Rename the shards to their final names, which contain the number of shards; write the index; return the names."""
    single, of = len(shards) == 1, f"of-{len(shards):05d}"
    names = ["model.safetensors"] if single else [f"model-{i + 1:05d}-{of}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        if (folder / f"{i}.partial").exists():  # otherwise an earlier attempt renamed it
            (folder / f"{i}.partial").rename(folder / name)
    if not single:
        weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(folder / "model.safetensors.index.json", json.dumps(index, indent=2))
    sync(folder)
    return names
