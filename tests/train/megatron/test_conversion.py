"""Convert checkpoints bitwise, once and never in part, with real checkpoints, processes, locks and kills."""

import contextlib
import importlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub.constants
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from launch.preflight import weight_tensors
from pipeline.boxes import Box, whole
from pipeline.checkpoints.checkpoint import COMPLETE
from pipeline.config import PolicyConfig
from pipeline.models import family
from pipeline.models.recorded_layout import record
from pipeline.models.weight_files import read_header, read_weight_files
from pipeline.train.initial_weights import initial_weights
from pipeline.train.megatron import conversion, conversion_cache
from pipeline.train.megatron.collectives import on_all_ranks
from pipeline.train.megatron.conversion import open_conversion
from pipeline.train.tensor_files import load_tensor, write_tensors
from tests.fork_server import context
from tests.models.cases import FAMILIES, write_models
from tests.problems import named, refused

SLOW_S = 0.05  # for each tensor that is read: a slow file system


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> Path:
    """Write a checkpoint of every family, with an old modification time: recently changed files are not remembered."""
    folder = tmp_path_factory.mktemp("families")
    write_models(folder)
    for file in folder.glob("*/*.safetensors"):
        os.utime(file, (time.time() - 60,) * 2)
    return folder


@pytest.fixture
def checkpoint(families, tmp_path) -> Path:
    """Return a copy of one of them, to damage."""
    return Path(shutil.copytree(families / "llama", tmp_path / "copy"))


@pytest.fixture
def shared(tmp_path) -> Path:
    return tmp_path / "shared"


def convert(checkpoint: Path, shared: Path, anew: bool = False, timeout_s: float = 60.0, **overrides) -> conversion.Conversion:
    """Return the conversion of a checkpoint. anew: convert it even if a conversion is complete."""
    policy, config = PolicyConfig(model_name=str(checkpoint)), AutoConfig.from_pretrained(checkpoint, **overrides)
    hidden = mock.patch.object(conversion_cache.ConversionCache, "find", return_value=None)
    with hidden if anew else contextlib.nullcontext():
        return open_conversion(policy, config, dist.group.WORLD, folder=shared, timeout_s=timeout_s)


def read(checkpoint: Path, made: conversion.Conversion) -> dict[str, torch.Tensor]:
    """Read the whole checkpoint back from a conversion, by its names on disk."""
    config, disk, back = AutoConfig.from_pretrained(checkpoint), load_file(checkpoint / "model.safetensors"), {}
    for name, parameter in family(config.model_type).parameters(config).items():
        _, pieces = record(parameter.function, [(source, tuple(disk[source].shape)) for source in parameter.sources])
        for piece in pieces:
            shape = tuple(disk[piece.name].shape)
            part = made.read(name, piece.target).reshape(piece.source.size)
            back.setdefault(piece.name, torch.full(shape, torch.nan, dtype=part.dtype))[piece.source.within(whole(shape))] = (
                part
            )
    return back


def assert_holds(made: conversion.Conversion, checkpoint: Path) -> None:
    disk, back = load_file(checkpoint / "model.safetensors"), read(checkpoint, made)
    assert back.keys() == disk.keys()
    for name, tensor in disk.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def folders(shared: Path) -> list[str]:
    """Return the entries of the only conversion cache, including hidden ones."""
    (only,) = [folder for folder in shared.iterdir() if folder.is_dir() and folder.name != "digests"]
    return sorted(folder.name for folder in only.iterdir())


# ---- content of a conversion


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip_is_bitwise(name, families, shared, realm):
    made = convert(families / name, shared)
    assert made.folder.parent.name.startswith(f"{name}-")
    assert_holds(made, families / name)


@pytest.mark.parametrize("name", FAMILIES)
def test_submission_accepts_the_tensors_of_every_family(name, families):
    """transformers wrote them. A checkpoint without one, with another shape or with one too many is refused."""
    folder = families / name
    config, stored = json.loads((folder / "config.json").read_text()), read_weight_files(folder).tensors
    assert list(weight_tensors.problems("k", folder, config, stored, "logprobs")) == []
    first, *rest = stored
    for wrong in (
        {n: stored[n] for n in rest},
        {**stored, "model.layers.0.other": stored[first]},
        {**stored, first: replace(stored[first], shape=(1, 2, 3))},
    ):
        assert named(weight_tensors.problems("k", folder, config, wrong, "logprobs")) == {("k", "unavailable-model")}


def test_a_new_conversion_is_logged_and_an_existing_one_is_not(checkpoint, shared, realm):
    said = []

    def phase(name: str) -> contextlib.AbstractContextManager:
        said.append(name)
        return contextlib.nullcontext()

    policy, config = PolicyConfig(model_name=str(checkpoint)), AutoConfig.from_pretrained(checkpoint)
    for _ in range(2):
        open_conversion(policy, config, dist.group.WORLD, folder=shared, phase=phase)
    assert said == ["wait for another job's conversion", "convert the checkpoint"]


def test_tensors_keep_their_own_precision(checkpoint, shared, realm):
    file = checkpoint / "model.safetensors"
    tensors = {n: t.bfloat16() if "proj" in n else t for n, t in load_file(file).items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    save_file(tensors, file, metadata={"format": "pt"})
    made = convert(checkpoint, shared)
    assert_holds(made, checkpoint)
    part = made.read("output_layer.weight", Box((3, 5), (7, 2)))
    assert torch.equal(part, tensors["lm_head.weight"][3:10, 5:7])


def test_tensors_of_any_size_are_aligned(tmp_path):
    tensors = {"three": torch.arange(3).bfloat16(), "one": torch.tensor(0.1).double(), "none": torch.ones(0, 2)}
    write_tensors({n: t.to("meta") for n, t in tensors.items()}, tmp_path / "file", make=tensors.get)
    stored = read_header(tmp_path / "file")
    assert all(stored[name].start % tensor.dtype.itemsize == 0 for name, tensor in tensors.items())
    for name, tensor in load_file(tmp_path / "file").items():
        assert torch.equal(tensor, tensors.pop(name))
        assert torch.equal(tensor, load_tensor(stored[name]))
    assert not tensors


def write_stale_copies(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Divide a checkpoint in two files that both hold every tensor; only one copy of each is right. Return the files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    files = {
        file: {name: tensor if weight_map[name] == file else tensor + 1 for name, tensor in tensors.items()}
        for file in set(weight_map.values())
    }
    for file, held in files.items():
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_the_index_chooses_among_copies_for_every_backend(checkpoint, families, shared, realm):
    """The first file's copies are stale for one half of the tensors, the last file's for the other half."""
    files = write_stale_copies(checkpoint)
    right = load_file(families / "llama/model.safetensors")
    policy, config = PolicyConfig(model_name=str(checkpoint)), AutoConfig.from_pretrained(checkpoint)
    read_box = initial_weights(policy, config, seed=0)  # of FSDP2, critics, frozen models, evaluations and exports
    made = convert(checkpoint, shared)
    back = read(families / "llama", made)
    for name, tensor in right.items():
        assert torch.equal(read_box(name, whole(tensor.shape)), tensor)
        assert torch.equal(back[name], tensor)
    (other, *_) = sorted(files)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(right, other)}))
    again = convert(checkpoint, shared)  # the same files, of which other tensors are read
    assert again.folder.parent != made.folder.parent
    for name, tensor in read(families / "llama", again).items():
        assert torch.equal(tensor, files[other][name])


def test_files_are_divided_like_a_sharded_checkpoint(checkpoint, shared, realm):
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "whole.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    made = convert(checkpoint, shared)
    (checkpoint.parent / "whole.safetensors").rename(checkpoint / "model.safetensors")
    assert_holds(made, checkpoint)


# ---- when a conversion is made


def zero_data(file: Path) -> None:
    """Zero the weights with size and time unchanged, so that reading them again is noticed."""
    status = file.stat()
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with open(file, "r+b") as content:
        content.seek(start)
        content.write(bytes(status.st_size - start))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_second_job_uses_the_conversion_without_reading_the_checkpoint(checkpoint, families, shared, realm):
    made = convert(checkpoint, shared)
    zero_data(checkpoint / "model.safetensors")
    again = convert(checkpoint, shared)
    assert again.folder == made.folder
    assert_holds(again, families / "llama")


def test_the_same_content_at_another_path_is_the_same_checkpoint(checkpoint, families, shared, realm):
    made = convert(families / "llama", shared)
    assert convert(checkpoint, shared).folder == made.folder
    assert folders(shared) == ["000001"]


def test_a_file_in_the_hub_cache_is_identified_by_its_name(families, tmp_path, shared, realm):
    made = convert(families / "llama", shared)
    (note,) = (shared / "digests").glob("*.json")
    digest = json.loads(note.read_text())["sha256"]
    cache = tmp_path / "hub" / "models--some--llama"
    snapshot = cache / "snapshots" / ("a" * 40)
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    shutil.copy(families / "llama" / "config.json", snapshot)
    shutil.copy(families / "llama" / "model.safetensors", cache / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    zero_data(cache / "blobs" / digest)
    assert convert(snapshot, shared).folder == made.folder


def test_an_edit_in_place_is_another_checkpoint(checkpoint, shared, realm):
    """Check an edit within the same tick of the clock, which leaves size, time and inode unchanged."""
    file = checkpoint / "model.safetensors"
    os.utime(file)
    made = convert(checkpoint, shared)
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    with open(file, "r+b") as same:
        same.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = convert(checkpoint, shared)
    assert again.folder.parent != made.folder.parent
    assert_holds(again, checkpoint)


def test_only_config_keys_that_shape_the_weights_matter(families, shared, realm):
    made = convert(families / "llama", shared)
    assert convert(families / "llama", shared, max_position_embeddings=128).folder == made.folder
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}  # the same shapes, other groups in them
    assert convert(families / "llama", shared, **heads).folder.parent != made.folder.parent


def test_a_new_conversion_leaves_a_reading_job_its_files(families, shared, realm):
    first = convert(families / "llama", shared)
    second = convert(families / "llama", shared, anew=True)
    assert [first.folder.name, second.folder.name] == ["000001", "000002"]
    assert_holds(first, families / "llama")  # opens its files only now
    assert convert(families / "llama", shared).folder == second.folder
    del first, second
    assert convert(families / "llama", shared, anew=True).folder.name == "000003"
    assert folders(shared) == ["000003"]


def test_a_damaged_conversion_is_not_used(families, shared, realm):
    made = convert(families / "llama", shared)
    (file,) = made.folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    again = convert(families / "llama", shared)
    assert again.folder.name == "000002"
    assert_holds(again, families / "llama")


# ---- several processes


def run_job(rank: int, size: int, store: Path, checkpoint: Path, shared: Path, slow: bool) -> None:
    """Run one train rank of a job; exit with 0 if the conversion is good."""
    torch.set_num_threads(1)
    if slow:
        conversion.load_tensor = lambda entry: (time.sleep(SLOW_S), load_tensor(entry))[1]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    assert_holds(convert(checkpoint, shared), checkpoint)
    dist.barrier()
    os._exit(0)


def start_job(checkpoint: Path, shared: Path, ranks: int = 1, slow: bool = True) -> list:
    store = shared.parent / f"store-{time.time_ns()}"
    processes = [context().Process(target=run_job, args=(i, ranks, store, checkpoint, shared, slow)) for i in range(ranks)]
    for process in processes:
        process.start()
    return processes


def finish(*jobs: list, within_s: float = 60) -> list[int]:
    """Return exit codes; a process that has not ended by then is killed and gives -9."""
    processes = [process for job in jobs for process in job]
    for process in processes:
        process.join(within_s)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_jobs_at_once_convert_once(families, shared):
    jobs = [start_job(families / "llama", shared) for _ in range(2)]
    assert finish(*jobs) == [0, 0]
    assert folders(shared) == ["000001"]


def test_ranks_share_the_work(families, shared):
    assert finish(start_job(families / "qwen3_moe", shared, ranks=3, slow=False)) == [0, 0, 0]
    assert folders(shared) == ["000001"]
    sizes = [file.stat().st_size for file in sorted(shared.glob("qwen3_moe-*/000001/rank*.safetensors"))]
    assert len(sizes) == 3
    assert max(sizes) < 0.5 * sum(sizes)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_conversion_killed_at_any_moment_is_repeated(families, shared, ranks, realm):
    tensors = len(load_file(families / "llama" / "model.safetensors"))
    moments = [0.0, *sorted(random.uniform(0, tensors * SLOW_S / ranks) for _ in range(3))]
    print("killed after", moments)
    killed_midway = 0
    for moment in moments:
        job = start_job(families / "llama", shared, ranks)
        until(lambda: any(shared.glob("llama-*/.*.partial")))
        time.sleep(moment)
        os.kill(job[0].pid, signal.SIGKILL)  # the rank that holds the lock; the other finds itself alone
        codes = finish(job, within_s=5)  # the other may wait for it
        assert codes[0] in (0, -signal.SIGKILL)
        if any(shared.glob("llama-*/000001")):  # it was done: begin again
            shutil.rmtree(shared)
            continue
        killed_midway += any(shared.glob("llama-*/.*.partial"))  # none, if it had just removed that of the job before
    assert killed_midway
    made = convert(families / "llama", shared)
    assert folders(shared) == ["000001"]
    assert_holds(made, families / "llama")


def test_a_killed_job_lets_the_waiting_one_convert(families, shared):
    first = start_job(families / "llama", shared)
    until(lambda: any(shared.glob("llama-*/.*.partial")))
    second = start_job(families / "llama", shared)
    time.sleep(0.3)
    os.kill(first[0].pid, signal.SIGKILL)
    assert finish(first, second) == [-signal.SIGKILL, 0]
    assert folders(shared) == ["000001"]


def hold(shared: Path, fingerprint: str) -> None:
    with conversion_cache.ConversionCache(shared, "other", fingerprint).lock(timeout_s=0):
        (shared / "held").touch()
        time.sleep(600)


def test_waiting_is_limited_and_names_the_other_job(families, shared, realm, caplog):
    caplog.set_level(logging.INFO)
    made = convert(families / "llama", shared)
    fingerprint = json.loads((made.folder / COMPLETE).read_text())["fingerprint"]
    other = context().Process(target=hold, args=(shared, fingerprint))
    other.start()
    try:
        until((shared / "held").exists)
        holder = f"process {other.pid} on {socket.gethostname()}"
        with pytest.raises(TimeoutError, match=rf"{fingerprint[:16]}\.lock: still held after 0.3 s by {holder}"):
            convert(families / "llama", shared, anew=True, timeout_s=0.3)
        assert f"waiting for {holder}" in caplog.text
        assert convert(families / "llama", shared).folder == made.folder  # what is complete needs no lock
    finally:
        other.kill()
        other.join()


def fail_on_one(rank: int, store: Path, told: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def work() -> str:
        if rank:
            raise ValueError("no such file: ä")
        return "fine"

    try:
        on_all_ranks(dist.group.WORLD, work)
    except Exception as error:
        (told / str(rank)).write_text(f"{type(error).__name__}: {error}")
    assert on_all_ranks(dist.group.WORLD, lambda: "é" * rank) == ["", "é"]
    os._exit(0)


def test_if_one_rank_fails_all_do(tmp_path):
    job = [context().Process(target=fail_on_one, args=(rank, tmp_path / "store", tmp_path)) for rank in range(2)]
    for process in job:
        process.start()
    assert finish(job) == [0, 0]
    assert (tmp_path / "0").read_text() == "RuntimeError: train rank 1: ValueError: no such file: ä"
    assert (tmp_path / "1").read_text() == "ValueError: no such file: ä"


# ---- its folder


def test_the_shared_folder(monkeypatch, tmp_path):
    with monkeypatch.context() as environment:
        for variable in (conversion_cache.VARIABLE, "NRL_MEGATRON_CHECKPOINT_DIR", "HF_HOME", "XDG_CACHE_HOME"):
            environment.delenv(variable, raising=False)
        environment.setenv("HOME", str(tmp_path))
        importlib.reload(huggingface_hub.constants)
        assert conversion.shared_folder() == tmp_path / ".cache/huggingface/hetstep"
        environment.setenv("XDG_CACHE_HOME", "/xdg")
        importlib.reload(huggingface_hub.constants)
        assert conversion.shared_folder() == Path("/xdg/huggingface/hetstep")
        environment.setenv("HF_HOME", "/hf")
        importlib.reload(huggingface_hub.constants)
        assert conversion.shared_folder() == Path("/hf/hetstep")
        environment.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "/nrl")
        assert conversion.shared_folder() == Path("/nrl")
        environment.setenv(conversion_cache.VARIABLE, "~/own")
        assert conversion.shared_folder() == tmp_path / "own"
    importlib.reload(huggingface_hub.constants)


@pytest.mark.parametrize("folder", ["/proc", "/dev/null/below"])
def test_an_unusable_folder_is_refused(folder, families, realm):
    with refused((conversion_cache.VARIABLE, "unwritable")) as error:
        convert(families / "llama", Path(folder))
    assert folder in str(error.value)


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    with refused((conversion_cache.VARIABLE, "file-not-found")):
        conversion._check_visible(tmp_path / "other-node" / "000001")


# ---- errors


def assert_refused(checkpoint: Path, shared: Path, message: str) -> None:
    with pytest.raises(ValueError, match=f"policy.model_name.*{message}"):
        convert(checkpoint, shared)
    assert not any(shared.glob("*/0*"))


def test_refuses_quantized_weights(checkpoint, shared, realm):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert_refused(checkpoint, shared, "is quantized")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), r"unknown \['extra'\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight \(31,\) for \(32,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_refuses_a_checkpoint_of_another_model(change, message, checkpoint, shared, realm):
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert_refused(checkpoint, shared, message)


def test_tied_copies_must_be_copies(families, tmp_path, shared, realm):
    checkpoint = Path(shutil.copytree(families / "qwen3_tied", tmp_path / "tied"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert_refused(checkpoint, shared, "lm_head.weight and model.embed_tokens.weight differ")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    made = convert(checkpoint, shared)
    assert_holds(made, families / "qwen3_tied")
