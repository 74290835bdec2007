"""The experts that an engine records reach the tokens that they belong to: episodes, samples, packed batches, messages."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.algorithms.advantages import make_sample
from pipeline.data.packing import pack
from pipeline.files.encoding import decode, encode
from pipeline.rollout.episode import Episode
from pipeline.types import NO_EXPERT, Completion, Prompt, Request, Rollout, Sampling, Turn

E, K = 3, 2


def rows(first: int, last: int) -> np.ndarray:
    """Return rows that have the numbers of their tokens as experts, as vLLM gives them."""
    return np.repeat(np.arange(first, last, dtype=np.uint8), E * K).reshape(-1, E, K)


def episode(draw: np.random.Generator) -> tuple[Episode, set[int]]:
    """Return an episode of up to three turns, some of them without records, and its tokens that have any."""
    prompt = Prompt(0, np.arange(draw.integers(1, 5), dtype=np.int32), "x", {})
    made, recorded = Episode(SimpleNamespace(prompts=[prompt]), 0, 0), set()
    for _ in range(draw.integers(1, 4)):
        tokens, length, known = len(made.tokens), int(draw.integers(1, 5)), made._routed
        has_records = draw.random() < 0.7
        experts = rows(known, tokens + length - 1) if has_records else None
        recorded |= set(range(known, tokens + length - 1)) if has_records else set()
        completion = Completion("a", np.ones(length, np.int32), np.zeros(length, np.float32), (), "stop", "", experts)
        made.turns.append(Turn(completion, np.ones(int(draw.integers(0, 3)), np.int32)))
    return made, recorded


@pytest.mark.parametrize("seed", range(40))
def test_each_token_has_its_own_row(seed):
    draw = np.random.default_rng(seed)
    samples, expected = [], []
    for _ in range(4):
        made, recorded = episode(draw)
        rollout = made.cut_rollout() if draw.random() < 0.3 else made.rollout()
        rollout = decode(encode(rollout), Rollout)  # as it crosses to rank 0, and lies in a buffer's checkpoint
        samples.append(make_sample(made.prompt, rollout, 1.0, 1.0))
        expected += [i if i in recorded else NO_EXPERT for i in range(len(samples[-1].tokens))]
    packed = pack(samples, "cpu").experts
    if packed is None:
        assert set(expected) == {NO_EXPERT}
        return
    assert packed.shape == (len(expected), E, K)
    assert torch.equal(packed, torch.tensor(expected, dtype=torch.int32)[:, None, None].expand(-1, E, K))


def test_the_recorder_on_gpus_takes_the_layers_with_experts(monkeypatch, caplog):
    """vLLM returns the rows of all layers; the first here is dense. Tokens after the last one do not count."""
    vllm_routing = pytest.importorskip("pipeline.generate.vllm_routing")
    monkeypatch.setattr(vllm_routing, "mixtures", lambda model: [SimpleNamespace(layer_id=1), SimpleNamespace(layer_id=2)])
    recorder = vllm_routing.RoutingRecorder(torch.nn.Module())
    request = Request("a", np.arange(4, dtype=np.int32), 0, Sampling(), routed=1)
    all_layers = np.arange(6 * 3 * K, dtype=np.uint8).reshape(6, 3, K)  # of tokens 1 to 6
    for given, expected in ((all_layers, all_layers[:5, 1:]), (all_layers[:4], None), (None, None)):
        recorder.watch("a-1", request)
        output = SimpleNamespace(routed_experts=given, token_ids=[7, 8, 9])
        found = recorder.experts("a", output)
        assert found is None if expected is None else np.array_equal(found, expected)
    assert len([record for record in caplog.records if record.name.startswith("pipeline.")]) == 1
