"""A prompt that several answers share is computed once, and everything that training reads stays the same."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.data.packing import pack
from pipeline.train import build, shared_prompts
from pipeline.train.context_parallel import localize
from pipeline.train.train_backend import ModelRole
from pipeline.types import LossOutput, PackedBatch, Sample
from tests.models.cases import write_models
from tests.train import cases

FAMILIES = ("llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")


def samples(prompts=((40, 3), (23, 1), (40, 2)), answers=(5, 17, 1, 17, 30, 8)) -> list[Sample]:
    """Return answers to several prompts, of which some end in the same length; the trained tokens of some have gaps."""
    drawn, made, lengths = np.random.default_rng(0), [], iter(answers)
    for length, count in prompts:
        prompt = drawn.integers(0, cases.VOCABULARY, length, np.int32)
        for _ in range(count):
            answer = next(lengths)
            mask = np.r_[np.zeros(length, bool), True, drawn.random(answer - 1) < 0.8]
            tokens = np.r_[prompt, drawn.integers(0, cases.VOCABULARY, answer, np.int32)]
            made.append(Sample(tokens, mask, *drawn.random((2, len(tokens))).astype(np.float32)))
    return sorted(made, key=lambda sample: -len(sample.tokens))


def test_rows_of_a_shared_batch():
    batch = pack(samples(), "cpu")
    local = shared_prompts.share(batch)
    saved = sum(length for number, (first, length) in enumerate(batch.prompts) if first != number)
    assert saved == 2 * 40 + 1 * 40 and local.tokens.size(1) == len(batch.tokens) - saved
    assert torch.equal(local.tokens[0, local.token_rows], batch.tokens)
    assert torch.equal(local.positions[0, local.token_rows], batch.positions)
    assert torch.equal(local.targets, batch.tokens[local.head.places])
    assert torch.equal(local.tokens[0, local.head.rows], batch.tokens[local.head.places - 1])
    assert local.head.places.tolist() == batch.wanted.nonzero()[0].tolist()
    starts = zip(local.packing.shared.key_starts, batch.cu_seqlens, strict=True)  # each sequence has all of its keys
    assert all(torch.equal(*pair) for pair in starts)
    assert torch.equal(local.tokens[0, local.packing.shared.key_rows], batch.tokens)


def test_small_savings_are_left_alone(monkeypatch):
    batch = pack(samples(), "cpu")
    assert shared_prompts.saved_tokens(batch) == 0
    monkeypatch.setattr(shared_prompts, "LEAST_TOKENS", 120)
    assert shared_prompts.saved_tokens(batch) == 120
    assert shared_prompts.saved_tokens(dataclasses.replace(batch, wanted=None)) == 0
    monkeypatch.setattr(shared_prompts, "LEAST_SHARE", 0.9)
    assert shared_prompts.saved_tokens(batch) == 0


@pytest.mark.parametrize(("ranks", "multiple"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_the_head_computes_wanted_rows_only(ranks, multiple):
    batch = pack(samples(), "cpu")
    parts = [localize(batch, ranks, rank, multiple) for rank in range(ranks)]
    assert sum(len(part.head.rows) for part in parts) == batch.wanted.sum()
    every = torch.cat([torch.full((part.head.count,), -1).index_copy(0, part.head.places, part.targets) for part in parts])
    found = every[parts[0].predicting_rows]
    wanted = torch.from_numpy(batch.wanted)
    assert torch.equal(found[wanted], batch.tokens[wanted])


def weighted(outputs, batch: PackedBatch) -> LossOutput:
    return LossOutput((outputs.logprobs * batch.advantages * batch.loss_mask).sum(), {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, FAMILIES)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_separate_sequences(family, folder, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        backend = build(cases.policy(folder / family), dist.group.WORLD, 7, ModelRole(entropy=True))
        batch = pack(samples(), "cpu")
        monkeypatch.setattr(shared_prompts, "LEAST_TOKENS", 1)
        rows = []
        backend._model.register_forward_pre_hook(lambda module, given: rows.append(given[0].tokens.size(1)))

        def run(batch: PackedBatch):
            (outputs,) = backend.forward([batch])
            backend._differentiate([batch], weighted)
            return outputs, {name: parameter.grad.clone() for name, parameter in backend._trained.items()}

        shared, shared_gradients = run(batch)
        separate, gradients = run(dataclasses.replace(batch, prompts=()))
        assert rows == [len(batch.tokens) - 120] * 2 + [len(batch.tokens)] * 2
        torch.testing.assert_close(shared.logprobs, separate.logprobs, rtol=0, atol=2e-5)
        torch.testing.assert_close(shared.entropy, separate.entropy, rtol=0, atol=2e-5)
        largest = max(gradient.abs().max() for gradient in gradients.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(shared_gradients[name], gradient, rtol=0, atol=2e-5 * largest, msg=name)
        everything, _ = run(dataclasses.replace(batch, prompts=(), wanted=None))
        wanted = torch.from_numpy(batch.wanted)
        torch.testing.assert_close(everything.logprobs[wanted], separate.logprobs[wanted], rtol=0, atol=2e-5)
        assert not separate.logprobs[~wanted].any() and everything.logprobs[~wanted].any()
    finally:
        dist.destroy_process_group()
