"""Every change to the files of a checkpoint or an export is found before it is read, and the message names the file."""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pipeline.boxes import whole
from pipeline.checkpoints import checkpoint, verification
from pipeline.checkpoints.checkpoint import COMPLETE, ROLLOUTS, Checkpoint, Checkpoints
from pipeline.config import CheckpointingConfig, RecipeError
from pipeline.config.checkpointing import EncryptionConfig
from pipeline.encryption import EncryptionKey
from pipeline.files.digests import MANIFEST, add_manifest
from pipeline.train.shards import collect_shards, read_shards
from pipeline.train.tensor_files import write_tensors
from tests.encryption.keys import random_key
from tests.problems import refused

FIRST, SECOND, CRITICS = (f"{folder}train-rank0000{rank}" for folder, rank in (("", 0), ("", 1), ("critic/", 0)))
WEIGHTS, INDEX = f"{FIRST}.safetensors", f"{FIRST}.json"
STATE = {"stream": {"position": 7}}


def save(checkpoints: Checkpoints, step: int, key: EncryptionKey | None = None) -> Checkpoint:
    """Save what two train ranks with a critic write."""
    partial, digests = checkpoints.begin(step), {}
    checkpoints.keep_rollouts(partial, b"rollouts" * 9)
    for model, folder in enumerate((partial, partial / "critic")):
        for rank in range(2):
            tensor = torch.full((40,), 10.0 * model + step + rank)
            entries = [(f"model.{rank}", (40,), whole((40,)), tensor)]
            written = collect_shards(entries, {"ranks": 2, "rank": rank}).write(folder, rank, key=key)
            digests |= {str((folder / name).relative_to(partial)): digest for name, digest in written.items()}
    return checkpoints.commit(partial, step, None, STATE, digests)


def opened(run_dir: Path, key: EncryptionKey | None = None) -> Checkpoints:
    section = CheckpointingConfig(keep_top_k=None, encryption=EncryptionConfig(enabled=key is not None))
    return Checkpoints(run_dir, "attempt", section, key=key)


@dataclass
class Saved:
    checkpoints: Checkpoints
    key: EncryptionKey | None
    folder: Path  # of step 2, of three steps

    def checked(self, verify: str = "full") -> Checkpoint:
        """Return the latest checkpoint, after the checks of a resuming run of three ranks."""
        found = self.checkpoints.latest()
        verification.check_record(found, verify, self.key)
        for rank in range(3):
            verification.check_share(found, verify, (rank, 3))
        return found


@pytest.fixture(params=["plain", "encrypted"])
def saved(request, tmp_path) -> Saved:
    if request.param == "encrypted":
        pytest.importorskip("cryptography")
    key = random_key() if request.param == "encrypted" else None
    checkpoints = opened(tmp_path, key)
    folders = [save(checkpoints, step, key).folder for step in (1, 2)]
    return Saved(checkpoints, key, folders[-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def rewrite(folder: Path, **values) -> None:
    record = json.loads((folder / COMPLETE).read_text())
    (folder / COMPLETE).write_text(json.dumps({**record, **values}))


def list_again(folder: Path) -> None:
    """Change a file and list its new digest, as somebody who knows the format would."""
    flip(folder / WEIGHTS)
    text = (folder / MANIFEST).read_text()
    new = subprocess.run(["sha256sum", WEIGHTS], cwd=folder, capture_output=True, text=True, check=True).stdout
    lines = [new.rstrip("\n") if line.endswith(f"  {WEIGHTS}") else line for line in text.splitlines()]
    (folder / MANIFEST).write_text("\n".join(lines) + "\n")


def earlier(folder: Path) -> Path:
    return folder.with_name("step_000001")


FOUND: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the weights": (lambda folder: flip(folder / WEIGHTS), WEIGHTS),
    "a bit of the last rank's weights": (lambda folder: flip(folder / f"{SECOND}.safetensors"), f"{SECOND}.safetensors"),
    "a bit of an index": (lambda folder: flip(folder / INDEX), INDEX),
    "a bit of the critic": (lambda folder: flip(folder / f"{CRITICS}.safetensors"), f"{CRITICS}.safetensors"),
    "a bit of the rollouts": (lambda folder: flip(folder / ROLLOUTS), ROLLOUTS),
    "zeros, as after a power cut": (
        lambda folder: (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size)), WEIGHTS
    ),
    "two ranks' files swapped": (
        lambda folder: swap(folder / WEIGHTS, folder / f"{SECOND}.safetensors"), f"{SECOND}.safetensors"
    ),
    "policy and critic swapped": (
        lambda folder: swap(folder / WEIGHTS, folder / f"{CRITICS}.safetensors"), f"{CRITICS}.safetensors"
    ),
    "a file of another step": (lambda folder: shutil.copy(earlier(folder) / WEIGHTS, folder / WEIGHTS), WEIGHTS),
    "an extra rank": (
        lambda folder: shutil.copy(folder / INDEX, folder / "train-rank00002.json"), "train-rank00002.json"
    ),
    "an extra file in a folder of it": (lambda folder: (folder / "critic/note").write_text("x"), "critic/note"),
    "an extra link": (lambda folder: (folder / "more").symlink_to("/tmp"), "more"),
    "a bit of the list": (lambda folder: flip(folder / MANIFEST), MANIFEST),
    "no list": (lambda folder: (folder / MANIFEST).unlink(), MANIFEST),
    "the list of another step": (lambda folder: shutil.copy(earlier(folder) / MANIFEST, folder / MANIFEST), MANIFEST),
    "a file changed and listed again": (list_again, MANIFEST),
    "another position in the data": (lambda folder: rewrite(folder, state={"stream": {"position": 0}}), COMPLETE),
    "another step in the record": (lambda folder: rewrite(folder, step=3), COMPLETE),
    "another metric": (lambda folder: rewrite(folder, metric=1.0), COMPLETE),
    "no digest in the record": (lambda folder: rewrite(folder, digests=None), COMPLETE),
}  # fmt: skip
SKIPPED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "renamed weights": (lambda folder: (folder / WEIGHTS).rename(folder / "weights.safetensors"), WEIGHTS),
    "weights that were cut": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8]), WEIGHTS),
    "no record": (lambda folder: (folder / COMPLETE).unlink(), COMPLETE),
    **{
        f"a record that is {text!r}": (lambda folder, text=text: (folder / COMPLETE).write_bytes(text), COMPLETE)
        for text in (b"{", b"{}", b"[]", b"\xff", bytes(40), b'{"step": 2, "metric": null, "state": {}, "files": ["x"]}')
    },
}
"""Changes that make a checkpoint incomplete, so that a run goes on from an earlier one, as after a kill."""
NEEDS_FULL = [case for case, (_, name) in FOUND.items() if name not in (MANIFEST, COMPLETE) and "extra" not in case]


def test_an_untouched_checkpoint_passes_and_sha256sum_agrees(saved):
    for verify in ("full", "size", "off"):
        assert saved.checked(verify).step == 2
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", MANIFEST], cwd=saved.folder, check=True)
    listed = [line.split()[1] for line in (saved.folder / MANIFEST).read_text().splitlines()]
    assert len(listed) == 9 and COMPLETE not in listed
    assert saved.checked().rollouts(saved.key) == b"rollouts" * 9
    reader, records = read_shards(saved.folder / "critic", saved.key)
    assert reader.read("model.1", whole((40,))).tolist() == [13.0] * 40 and records[1]["rank"] == 1


@pytest.mark.parametrize("case", FOUND)
def test_tampering_is_an_error_that_names_the_file(saved, case):
    change, name = FOUND[case]
    change(saved.folder)
    with refused(("checkpoint", "damaged")) as error:
        saved.checked()
    assert f"{name}: got" in str(error.value) and "; expected" in str(error.value)
    assert "the run then goes on from step 1" in str(error.value)
    if case in NEEDS_FULL:
        assert saved.checked("size").step == 2
    else:
        with refused(("checkpoint", "damaged")):
            saved.checked("size")


@pytest.mark.parametrize("case", SKIPPED)
def test_an_incomplete_checkpoint_is_skipped_with_a_warning_that_names_the_file(saved, caplog, case):
    change, name = SKIPPED[case]
    change(saved.folder)
    assert saved.checked().step == 1
    assert f"{saved.folder} is skipped" in caplog.text and f"{name}: got" in caplog.text
    assert name in checkpoint.incomplete(saved.folder)


def test_without_an_earlier_step_there_is_no_advice_to_go_back(saved):
    shutil.rmtree(earlier(saved.folder))
    flip(saved.folder / WEIGHTS)
    with refused(("checkpoint", "damaged")) as error:
        saved.checked()
    assert "no earlier step is complete" in str(error.value)


def test_a_record_that_was_sealed_again_without_the_key_is_found(saved):
    """Without a key digests find accidents; with one also somebody who knows the format."""
    record = json.loads((saved.folder / COMPLETE).read_text()) | {"state": {}}
    (saved.folder / COMPLETE).write_text(json.dumps({**record, **checkpoint.seals(record, None)}))
    if saved.key is None:
        assert saved.checked().state == {}
        return
    with refused(("checkpoint", "damaged")):
        saved.checked()


@pytest.mark.parametrize("case", FOUND)
def test_submission_finds_what_shows_without_the_key_and_without_reading_large_files(saved, case):
    given = CheckpointingConfig(encryption=EncryptionConfig(key_command="show"))
    verification.check_before_submission(saved.checkpoints.latest(), given)
    FOUND[case][0](saved.folder)
    if case in NEEDS_FULL:
        verification.check_before_submission(saved.checkpoints.latest(), given)
        return
    with refused(("checkpoint", "damaged")):
        verification.check_before_submission(saved.checkpoints.latest(), given)


def test_submission_refuses_a_recipe_without_the_key_of_its_checkpoints(saved):
    if saved.key is None:
        verification.check_before_submission(saved.checkpoints.latest(), CheckpointingConfig())
        return
    with refused(("checkpointing.encryption", "wrong-key")):
        verification.check_before_submission(saved.checkpoints.latest(), CheckpointingConfig())


def test_submission_refuses_a_wrong_key_that_it_can_read(saved, tmp_path):
    file = tmp_path / "other.key"
    file.write_text("cd" * 32)
    file.chmod(0o600)
    given = CheckpointingConfig(encryption=EncryptionConfig(key_file=str(file)))
    if saved.key is None:
        verification.check_before_submission(saved.checkpoints.latest(), given)
    else:
        with refused(("checkpointing.encryption", "wrong-key")):
            verification.check_before_submission(saved.checkpoints.latest(), given)
    elsewhere = CheckpointingConfig(encryption=EncryptionConfig(key_file=str(tmp_path / "on_the_nodes.key")))
    verification.check_before_submission(saved.checkpoints.latest(), elsewhere)


def test_a_file_that_network_file_systems_leave_is_not_extra(saved):
    (saved.folder / ".nfs000000000001").write_text("")
    assert saved.checked().step == 2


def test_a_checkpoint_of_an_earlier_version_has_no_digests_and_loads(tmp_path):
    checkpoints = opened(tmp_path)
    folder = save(checkpoints, 1).folder
    record = json.loads((folder / COMPLETE).read_text())
    for name in ("digests", "seal", "encryption"):
        del record[name]
    (folder / COMPLETE).write_text(json.dumps(record | {"version": 2}))
    (folder / MANIFEST).unlink()
    assert Saved(checkpoints, None, folder).checked().step == 1


def test_the_ranks_divide_the_files(saved, monkeypatch):
    read: list[str] = []
    of_files = verification.digests.of_files
    monkeypatch.setattr(verification.digests, "of_files", lambda folder, names: read.extend(names) or of_files(folder, names))
    saved.checked()
    assert len(read) == len(set(read)) == 9


@pytest.mark.parametrize("given", ["another", None])
def test_the_wrong_key_is_found_before_anything_is_read(tmp_path, given):
    pytest.importorskip("cryptography")
    key, other = random_key(), random_key()
    found = save(opened(tmp_path, key), 1, key)
    text = (found.folder / COMPLETE).read_text()
    assert key.fingerprint in text
    for path in found.folder.rglob("*.safetensors"):
        path.unlink()
    with refused(("checkpointing.encryption", "wrong-key")) as error:
        verification.check_key(checkpoint.read_record(found.folder), other if given else None)
    assert f"fingerprint {key.fingerprint}" in str(error.value)
    verification.check_same_key(key, key.fingerprint)
    with refused(("checkpointing.encryption", "wrong-key")):
        verification.check_same_key(other if given else None, key.fingerprint)


# ---- exports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path) -> Path:
    """Return a folder with the files of an export in two shards."""
    folder = tmp_path / "hf"
    folder.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    digests = {name: write_tensors({name: torch.full((9,), float(len(name)))}, folder / name) for name in names}
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (folder / name).write_text(json.dumps({"of": name}))
    (folder / "README.md").write_text("a card")
    add_manifest(folder, digests, ("README.md",))
    return folder


SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
CHANGED_EXPORTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the weights": (lambda folder: flip(folder / SHARDS[1]), SHARDS[1]),
    "a bit of the configuration": (lambda folder: flip(folder / "config.json"), "config.json"),
    "a bit of the tokenizer": (lambda folder: flip(folder / "tokenizer.json"), "tokenizer.json"),
    "shards swapped": (lambda folder: swap(*(folder / name for name in SHARDS)), SHARDS[0]),
    "a shard missing": (lambda folder: (folder / SHARDS[0]).unlink(), SHARDS[0]),
    "a shard cut off": (lambda folder: (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes()[:-4]), SHARDS[0]),
    "a shard renamed": (lambda folder: (folder / SHARDS[0]).rename(folder / "model.safetensors"), "model.safetensors"),
    "an extra file": (lambda folder: (folder / "model-00003-of-00002.safetensors").touch(), "model-00003-of-00002.safetensors"),
    "a list that is none": (lambda folder: (folder / MANIFEST).write_text("x\n"), MANIFEST),
    "a list that is no text": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\n"), MANIFEST),
}


@pytest.mark.parametrize("case", CHANGED_EXPORTS)
def test_a_changed_export_is_refused(exported, case):
    change, name = CHANGED_EXPORTS[case]
    change(exported)
    with refused(("policy.model_name", "damaged")) as error:
        for rank in range(2):
            verification.check_export("policy.model_name", exported, "full", (rank, 2))
    assert f"{name}: " in str(error.value) and "got" in str(error.value)
    verification.check_export("policy.model_name", exported, "off")


def test_an_export_may_get_another_card_and_caches(exported):
    (exported / "README.md").write_text("another card")
    (exported / ".cache").mkdir()
    (exported / ".cache/huggingface").touch()
    verification.check_export("policy.model_name", exported, "full")
    flip(exported / SHARDS[0])
    verification.check_export("policy.model_name", exported, "size")
    (exported / MANIFEST).unlink()  # a model from elsewhere has none
    verification.check_export("policy.model_name", exported, "full")


def test_a_problem_names_at_most_four_files(exported):
    for path in exported.iterdir():
        if path.name != MANIFEST:
            flip(path)
    with pytest.raises(RecipeError, match="and 1 more files"):
        verification.check_export("policy.model_name", exported, "full")
