"""FSDP2's encrypted checkpoints resume to the last bit, hold nothing in the clear, and export as plain ones do."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

pytest.importorskip("cryptography")

from pipeline.config import TokenizerConfig
from pipeline.files.stored_files import read_bytes
from pipeline.train.hf_export import export_checkpoint
from pipeline.train.shards import local
from tests.encryption.keys import random_key
from tests.encryption.plain import holding
from tests.end_to_end.runs import ROOT
from tests.problems import refused
from tests.train import cases, ranks

ALL = list(range(len(cases.LENGTHS)))
FAMILY = "qwen3_moe"
WRONG = ("checkpointing.encryption", "wrong-key")


def two_steps(trained) -> tuple:
    metrics = [cases.learn(trained, [cases.pack(ALL)]) for _ in range(2)]
    return metrics, torch.rand(3).tolist(), [local(p).clone() for p in trained._model.parameters()]


def test_a_rank_resumes_to_the_last_bit_and_leaves_nothing_plain(models, realm, tmp_path):
    policy = cases.policy(
        models / FAMILY, scheduler=ranks.SCHEDULER, tokenizer=TokenizerConfig(str(ROOT / "recipes/tiny"))
    )  # fmt: skip
    key, trained = random_key(), ranks.backend(policy)
    two_steps(trained)
    trained.shards().write(tmp_path / "plain", 0)
    trained.shards(copy=True).write(tmp_path / "encrypted", 0, key=key)
    for plain in (tmp_path / "plain").iterdir():
        assert read_bytes(tmp_path / "encrypted" / plain.name, key) == plain.read_bytes()
    pieces = [p.detach().numpy().tobytes()[:32] for p in trained._model.parameters()] + [b"model.embed_tokens", b"exp_avg"]
    assert len(holding(tmp_path / "plain", pieces)) == 2 and holding(tmp_path / "encrypted", pieces) == []
    expected = two_steps(trained)
    for other in (ranks.backend(policy), trained):  # in a new process, and back in the old one
        for wrong in (random_key(), None):
            with refused(WRONG) as error:
                other.load(tmp_path / "encrypted", wrong)
            assert key.fingerprint in str(error.value)
        other.load(tmp_path / "encrypted", key)
        metrics, drawn, parameters = two_steps(other)
        assert (metrics, drawn) == expected[:2]
        assert all(torch.equal(a, b) for a, b in zip(parameters, expected[2], strict=True))
    for name in ("plain", "encrypted"):
        export_checkpoint(tmp_path / name, policy, tmp_path / f"hf-{name}", key=key)
    ours, theirs = (load_file(tmp_path / f"hf-{name}" / "model.safetensors") for name in ("encrypted", "plain"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def save_or_load(work: str, key, layout: ranks.Layout, folder) -> None:
    """Save with a layout and remember the weights, or load with another and compare."""
    trained = ranks.backend(cases.policy(folder / "qwen3"), layout)
    if work == "save":
        trained.step(ranks.batches(trained, layout), cases.loss)
        trained.shards().write(folder / "split", dist.get_rank(), key=key)
        torch.save(ranks.weights(trained), folder / f"weights{dist.get_rank()}")
    else:
        trained.load(folder / "split", key)
        found, expected = ranks.weights(trained), torch.load(folder / "weights0")  # of rank 0; others have none
        assert dist.get_rank() or all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


class Work:
    """What each rank does: a function with a key, which processes only get by forking."""

    def __init__(self, work: str, secret: bytes):
        self.work, self.secret = work, secret

    def __call__(self, layout, folder) -> None:
        from pipeline.encryption import EncryptionKey

        save_or_load(self.work, EncryptionKey(self.secret), layout, folder)


@pytest.mark.full
def test_any_layout_reads_parts_of_encrypted_files(models):
    secret = bytes(range(32))
    ranks.run(Work("save", secret), ranks.Layout(2, 2), models)
    ranks.run(Work("load", secret), ranks.Layout(3, 1), models)
