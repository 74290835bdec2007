"""Measure one engine that decodes all requests at once, to the last token of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from launch.recipes.model_files import read_json
from pipeline import generate
from pipeline.config import RECIPES
from pipeline.generate.generate_backend import GenerateBackend
from pipeline.types import Request, Sampling
from tests.gpu_check.measurement import Measurement, Place
from tests.gpu_check.sizes import SIZES, case


@dataclass(frozen=True)
class Load:
    requests: int
    prompt: int  # tokens
    answer: int  # tokens


LOADS = {"full": Load(128, 128, 256), "tiny": Load(4, 8, 8)}


def decode(place: Place, backend: str) -> Measurement:
    load, model = LOADS[place.size], SIZES[place.size].model
    overrides = [
        f"policy.generation.backend={backend}",
        f"policy.generation.max_num_seqs={load.requests}",
        f"policy.max_total_sequence_length={load.prompt + load.answer}",
        f"policy.generation.vllm_cfg.enforce_eager={str(place.device == 'cpu').lower()}",
    ]
    policy = case("decode", "tiny_grpo", place, model, *overrides).load().policy
    policy.generation.vllm_kwargs.clear()  # the cache has the size that the backend gives it
    engine = generate.build(policy, 1, 0, 0)
    update = engine.update()
    update.load(_weights(engine, torch.device(place.device), getattr(torch, policy.precision)))
    update.commit(0)
    vocabulary = int(model.get("vocab_size", 64))
    _drain(engine, _requests(load, vocabulary, load.answer // 4))  # graphs and kernels are made
    drawn: list[int] = []
    spent = place.seconds(lambda: drawn.append(_drain(engine, _requests(load, vocabulary, load.answer))))
    note = f"{load.requests} requests, {load.prompt} + {load.answer} tokens each"
    details = {"model": read_json(RECIPES / "tiny/config.json") | model, **asdict(load)}
    return Measurement({"tokens/s": drawn[0] / spent, "s": spent}, note, details=details)


def _weights(engine, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    draw = torch.Generator(device).manual_seed(0)
    for name, shape in engine.shapes.items():
        yield name, (0.02 * torch.randn(shape, generator=draw, device=device)).to(dtype)


def _requests(load: Load, vocabulary: int, answer: int) -> list[Request]:
    random, settings = np.random.default_rng(0), Sampling(max_new_tokens=answer)
    prompts = random.integers(3, vocabulary, (load.requests, load.prompt)).astype(np.int32)
    return [Request(f"{answer}/{i}", prompt, i, settings) for i, prompt in enumerate(prompts)]


def _drain(engine: GenerateBackend, requests: list[Request]) -> int:
    """Return the number of drawn tokens."""
    engine.add(requests)
    drawn = 0
    while engine.pending:
        drawn += sum(len(completion.tokens) for completion in engine.step())
    return drawn
