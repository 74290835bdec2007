"""Encrypted runs: the numbers of a plain run to the last bit, after a kill too, and nothing plain in the run folder."""

import json
import os
import shutil
import subprocess
import sys

import hetstep
import pytest

pytest.importorskip("cryptography")

from launch import export, report
from launch.api.training import Run as ApiRun
from launch.runs.run_keys import VARIABLE
from pipeline.boxes import whole
from pipeline.checkpoints.checkpoint import ROLLOUTS, complete_in
from pipeline.config import RecipeError
from pipeline.evaluation.answers import read_answers
from pipeline.files.stored_files import is_encrypted, obtain_key
from pipeline.observe.metrics import read_rollouts
from pipeline.train.shards import read_shards
from tests.encryption.keys import key_file
from tests.encryption.plain import holding
from tests.end_to_end.runs import LOCAL, Fault, submit
from tests.end_to_end.test_async import AHEAD, SLOW
from tests.end_to_end.test_lineage import run as command

SECTION = "checkpointing.encryption"


def encrypted_by(path) -> tuple[str, ...]:
    return (f"{SECTION}.enabled=true", f"{SECTION}.key_file={path}")


def secrets_of(folder, key, text: str) -> list[bytes]:
    """Return bytes of a run that must not be on disk: the key, prompts, answers, token ids and weights."""
    records = [record for path in folder.glob("rollouts/*.jsonl") for record in read_rollouts(path, lambda: key)]
    tokens = {str(record["prompt_tokens"]) for record in records} | {str(record["completion_tokens"]) for record in records}
    texts = {record["prompt"] for record in records} | {record["completion"] for record in records}
    assert len(records) > 10
    reader, _ = read_shards(complete_in(folder / "checkpoints")[-1].folder, key)
    names = [name for name in reader.shapes if name.startswith("model.")]
    weights = [reader.read(name, whole(reader.shapes[name])).numpy().tobytes()[:24] for name in names if "norm" not in name]
    found = [text.encode(), *(text.encode() for text in tokens | texts), *weights, b"model.embed_tokens", b"exp_avg"]
    return [piece for piece in found if len(piece) >= 8]


@pytest.mark.full  # by default: tests/train/test_encrypted_checkpoints.py
def test_a_killed_encrypted_run_is_the_plain_run_to_the_last_bit(tmp_path, uninterrupted, capsys, monkeypatch):
    folder, text = tmp_path / "run", os.urandom(32).hex()
    right, wrong = key_file(tmp_path / "key", text), key_file(tmp_path / "wrong", os.urandom(32).hex())
    given = ("checkpointing.async_save=true", *LOCAL)
    broken = submit(folder, *given, *encrypted_by(right), fault=Fault("write checkpoint", victim=1, actor=0, count=3))
    assert broken.status == 1, broken.output
    key = obtain_key(str(right), None)
    assert holding(folder, secrets_of(folder, key, text)) == []
    refused = submit(folder, *given, *encrypted_by(wrong))
    assert refused.status == 2 and f"expected the key with fingerprint {key.fingerprint}" in refused.output  # by submission
    command = (f"{SECTION}.enabled=true", f"{SECTION}.key_command='cat {right}'")
    resumed = submit(folder, *given, *command)
    assert resumed.status == 0, resumed.output
    assert resumed.metrics() == uninterrupted
    paths = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".jsonl") and path.name != "metrics.jsonl"]
    encrypted = {path for path in paths if is_encrypted(path.read_bytes())}
    assert {path.name for path in encrypted} >= {"train-rank00001.safetensors", "step_000004.jsonl"}
    assert holding(folder, secrets_of(folder, key, text)) == []
    readers(folder, tmp_path, right, key, capsys, monkeypatch)
    assert holding(folder, secrets_of(folder, key, text)) == []


def readers(folder, elsewhere, right, key, capsys, monkeypatch) -> None:
    """Check every reader with the key, and without it once the file has moved."""
    prompt = ApiRun(folder).rollouts(4)[0]["prompt"]
    assert export.main([f"run={folder}"]) == 2
    assert f"out: got none; expected out=DIR, because {folder}" in capsys.readouterr().err
    assert export.main([f"run={folder}", f"out={elsewhere / 'hf'}"]) == 0, capsys.readouterr().err
    assert (elsewhere / "hf/model.safetensors").exists()
    assert report.main([f"run={folder}"]) == 0
    assert repr(prompt) in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert "a page in the run folder shows no encrypted samples" in page
    assert report.main([f"run={folder}", f"out={elsewhere / 'page.html'}"]) == 0
    assert "encrypted samples" not in (elsewhere / "page.html").read_text()
    shutil.move(right, elsewhere / "moved")
    expected = f"fingerprint {key.fingerprint}"
    capsys.readouterr()
    assert report.main([f"run={folder}", f"out={elsewhere / 'page.html'}"]) == 0
    assert str(right) in capsys.readouterr().out
    monkeypatch.setenv(VARIABLE, str(key_file(elsewhere / "other", "ab" * 32)))
    with pytest.raises(RecipeError, match=expected):
        ApiRun(folder).rollouts(4)
    assert export.main([f"run={folder}", f"out={elsewhere / 'hf2'}"]) == 2
    assert expected in capsys.readouterr().err
    monkeypatch.setenv(VARIABLE, str(elsewhere / "moved"))
    assert ApiRun(folder).rollouts(4)[0]["prompt"] == prompt
    bundle = [sys.executable, "launch/bundle.py", f"run={folder}", f"out={elsewhere / 'b.tar.gz'}"]
    subprocess.run(bundle, check=True, capture_output=True)
    shutil.unpack_archive(elsewhere / "b.tar.gz", elsewhere / "bundle")
    assert holding(elsewhere / "bundle", secrets_of(folder, key, (elsewhere / "moved").read_text())) == []


@pytest.mark.full
def test_rollouts_that_no_step_has_trained_on_are_encrypted_and_kept(tmp_path):
    folder, text = tmp_path / "run", os.urandom(32).hex()
    key_path = key_file(tmp_path / "key", text)
    given = (*LOCAL, *AHEAD, *SLOW, *encrypted_by(key_path))
    broken = submit(folder, *given, fault=Fault("step", victim=0, actor=0, count=5))
    assert broken.status == 1, broken.output
    kept = list(folder.glob(f"checkpoints/step_*/{ROLLOUTS}"))
    assert kept and all(is_encrypted(path.read_bytes()) for path in kept)
    resumed = submit(folder, *given)
    assert resumed.status == 0, resumed.output
    assert any(line.get("async/resumed_rollouts_kept", 0) > 0 for line in resumed.metrics())
    assert holding(folder, secrets_of(folder, obtain_key(str(key_path), None), text)) == []


@pytest.mark.full
def test_an_encrypted_checkpoint_is_evaluated(tmp_path, monkeypatch):
    folder, text = tmp_path / "a run", os.urandom(32).hex()
    key_path, keys = key_file(tmp_path / "key", text), ("checkpointing.save_consolidated=false", "cluster.executor=local")
    small = ("sft.max_num_steps=2", "sft.val_at_end=false", "cluster.train.ranks_per_node=1")
    command("submit", "recipe=tiny_sft", f"run_dir={folder}", *small, *keys, *encrypted_by(key_path))
    asked = ("suite=tiny", f"run={folder}", "policy.generation.backend=transformers")
    few = "evaluate.tasks.addition.data.max_samples=8"
    wrong = key_file(tmp_path / "wrong", "ab" * 32)
    refused = command("evaluate", *asked, few, f"{SECTION}.key_file={wrong}", status=1)
    key = obtain_key(str(key_path), None)
    assert f"expected the key with fingerprint {key.fingerprint}" in refused
    command("evaluate", *asked, few)
    evaluation = hetstep.load(next(folder.glob("evaluations/tiny/step_*")))
    assert evaluation.scores()["addition"].questions == 8
    answers = evaluation.folder / "answers/addition.jsonl"
    assert len(read_answers(answers, lambda: key)) == 8
    assert all(set(json.loads(line)) == {"encrypted", "line"} for line in answers.read_text().splitlines())
    assert holding(folder, [text.encode(), b'"question"', b"model.embed_tokens"]) == []
    shutil.move(key_path, tmp_path / "moved")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "moved"))
    assert [each.task for each in evaluation.compare(evaluation)] == ["addition"]
