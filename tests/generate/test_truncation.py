"""Log-probs that real engines return for truncated draws equal the train backend's."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pipeline.config import GenerationConfig
from pipeline.data.packing import pack
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole
from pipeline.types import Completion, Request, Sample
from tests.generate.tiny import drain, requests
from tests.train import cases

SETTINGS = [{"top_p": 0.8}, {"top_k": 5}, {"top_k": 12, "top_p": 0.7}]


@pytest.fixture(scope="module")
def drawn(new_engine):
    """Return [(request, completion)] by both engines for each setting. vLLM comes first: it makes the default group."""
    found = []
    for kind in ("vllm", "transformers"):
        engine = new_engine(kind, "llama")
        for settings in SETTINGS:
            asked = requests(6, 4, temperature=0.8, **settings)
            done = drain(engine, asked)
            found.append([(request, done[request.id]) for request in asked])
        engine.close()
    return dict(zip(((kind, i) for kind in ("vllm", "transformers") for i in range(len(SETTINGS))), found, strict=True))


@pytest.mark.parametrize(
    "setting",
    [pytest.param(i, marks=[pytest.mark.full] * (i < 2), id=str(setting)) for i, setting in enumerate(SETTINGS)],
)
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_an_engine_s_log_probs_are_the_train_backend_s(drawn, kind, setting, checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    generation = GenerationConfig(temperature=0.8, **SETTINGS[setting])
    policy = cases.policy(checkpoint("llama", 0).folder, generation=generation)
    trained = FSDPBackend(policy, dist.group.WORLD, seed=0, role=ModelRole(truncated=True))
    batch = pack([_sample(request, completion) for request, completion in drawn[kind, setting]], trained.device)
    (found,) = trained.forward([batch])
    counted = batch.loss_mask
    assert found.logprobs[counted].isfinite().all()
    assert (found.logprobs - batch.generate_logprobs)[counted].abs().max() < 1e-4
    assert (found.logprobs - found.full_logprobs)[counted].mean() > 0.05  # the truncation had an effect


def _sample(request: Request, completion: Completion) -> Sample:
    before = np.zeros(len(request.tokens), dtype=np.float32)
    tokens = np.concatenate([request.tokens, completion.tokens])
    mask = np.arange(len(tokens)) >= len(before)
    return Sample(tokens, mask, np.concatenate([before, completion.logprobs]), np.zeros(len(tokens), np.float32))
