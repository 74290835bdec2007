"""Megatron-Core's encrypted checkpoints resume to the last bit, and hold nothing in the clear."""

import pytest
import torch

pytest.importorskip("cryptography")

from pipeline.files.stored_files import read_bytes
from tests.encryption.keys import random_key
from tests.encryption.plain import holding
from tests.problems import refused
from tests.train import ranks
from tests.train.megatron.layouts import ONE
from tests.train.megatron.test_checkpoints import build, three_steps


def test_a_rank_resumes_to_the_last_bit_and_leaves_nothing_plain(models, realm, tmp_path):
    key, trained = random_key(), build(models, "qwen3_moe")
    three_steps(trained, ONE)
    trained.shards().write(tmp_path / "plain", 0)
    trained.shards(copy=True).write(tmp_path / "encrypted", 0, key=key)
    for plain in (tmp_path / "plain").iterdir():
        assert read_bytes(tmp_path / "encrypted" / plain.name, key) == plain.read_bytes()
    pieces = [t.numpy().tobytes()[:32] for t in ranks.weights(trained).values() if t.abs().max() > 0 and t.std() > 0]
    assert len(pieces) > 10
    assert len(holding(tmp_path / "plain", [*pieces, b"model.embed_tokens"])) == 2
    assert holding(tmp_path / "encrypted", [*pieces, b"model.embed_tokens"]) == []
    drawn = torch.rand(3)
    expected = three_steps(trained, ONE)
    for other in (build(models, "qwen3_moe"), trained):  # in a new process, and back in the old one
        with refused(("checkpointing.encryption", "wrong-key")) as error:
            other.load(tmp_path / "encrypted", random_key())
        assert key.fingerprint in str(error.value)
        other.load(tmp_path / "encrypted", key)
        assert torch.equal(torch.rand(3), drawn)
        assert three_steps(other, ONE) == expected
