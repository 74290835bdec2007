"""Compare drawn tokens' log-probs under changing weights with a recomputation by the version that each claims."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.types import Completion, Request, VersionSpan
from tests.generate.tiny import Checkpoint, refit, requests

BLOCK = 32  # tokens in a block of vLLM's cache; the minimum of its CPU kernels
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head size, float32


@dataclass(frozen=True)
class Case:
    """An engine, and a wave of requests for each version of the weights, which change after `steps` steps each."""

    backend: str
    settings: dict = field(default_factory=dict)
    prompt: int = 3  # tokens of the shortest prompt
    temperature: float = 1.0
    steps: int = 4

    def waves(self) -> list[list[Request]]:
        """Return groups of two; later waves repeat the first one's prompts under other names and seeds."""
        asked = requests(4, 2, temperature=self.temperature, max_new_tokens=14)
        first = np.random.default_rng(7).integers(2, 96, self.prompt)
        waves = []
        for version in range(3):
            tokens = [np.concatenate([first, r.tokens]).astype(np.int32) if self.prompt > 3 else r.tokens for r in asked]
            waves.append(
                [Request(f"{version}/{r.id}", t, r.seed + version, r.sampling) for r, t in zip(asked, tokens, strict=True)]
            )
        return waves


def small(**settings) -> dict:
    """Return an engine with small blocks."""
    return {"max_model_len": 128, "max_num_seqs": 16, "vllm_kwargs": {"block_size": BLOCK, **settings}}


CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24}
FEW = {"kv_cache_memory_bytes": 13 * BLOCK_BYTES}  # 12 blocks; a request takes up to 3
CASES = {
    "transformers": Case("transformers"),
    "vllm": Case("vllm"),
    "vllm, cached prefixes": Case("vllm", small(), prompt=40),
    # On CPU vLLM cannot draw with a seed from a prompt in pieces, so this is greedy.
    "vllm, prompts in pieces": Case("vllm", small(**CHUNKS), prompt=40, temperature=0.0, steps=6),
    "vllm, preemption": Case("vllm", small(**FEW), prompt=20, steps=8),
    "vllm, all of these": Case("vllm", small(**CHUNKS, **FEW), prompt=40, temperature=0.0, steps=9),
}


@dataclass
class Seen:
    """The history of requests: completions, and how much of each was computed when weights changed."""

    asked: dict[str, Request]
    done: dict[str, Completion] = field(default_factory=dict)
    fed: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # (version, tokens whose keys and values existed)
    cached: set[str] = field(default_factory=set)  # found a prefix in vLLM's cache
    partial: set[str] = field(default_factory=set)  # had half a prompt computed when weights changed
    preempted: set[str] = field(default_factory=set)

    def packed(self) -> dict:
        """Return it as JSON."""
        done = [
            (c.id, c.tokens.tolist(), c.logprobs.tolist(), [(s.version, s.tokens) for s in c.spans]) for c in self.done.values()
        ]
        return {"done": done, "fed": self.fed, "preempted": sorted(self.preempted)}

    @classmethod
    def unpacked(cls, packed: dict, case: Case) -> Seen:
        done = {
            id: Completion(id, np.array(tokens), np.array(logprobs), tuple(VersionSpan(*span) for span in spans), "")
            for id, tokens, logprobs, spans in packed["done"]
        }
        asked = {request.id: request for wave in case.waves() for request in wave}
        return cls(asked, done, packed["fed"], preempted=set(packed["preempted"]))

    def step(self, engine) -> None:
        self.done |= {completion.id: completion for completion in engine.step()}
        for id, _, cached, preemptions in running(engine):
            if cached:
                self.cached.add(id)
            if preemptions:
                self.preempted.add(id)

    def change(self, engine, version: int) -> None:
        for id, fed, _, _ in running(engine):
            self.fed.setdefault(id, []).append((version, fed))
            if 0 < fed < len(self.asked[id].tokens) - 1:
                self.partial.add(id)


def running(engine) -> list[tuple[str, int, int, int]]:
    """Return for each running request its name, tokens in the cache, those found there, and its number of preemptions."""
    if hasattr(engine, "_rows"):
        return [(row.request.id, row.length, 0, 0) for row in engine._rows]
    states, held = engine._engine.output_processor.request_states, engine._core.scheduler.requests
    pairs = [(states[id], request) for id, request in held.items() if id in states]
    return [(s.external_req_id, r.num_computed_tokens, s.num_cached_tokens, r.num_preemptions) for s, r in pairs]


def drive(engine, case: Case, weights: list[dict[str, torch.Tensor]], recompute: bool) -> Seen:
    """Run three waves under versions 0, 1 and 2, of which 0 and 2 are the same weights."""
    waves = case.waves()
    seen = Seen({request.id: request for wave in waves for request in wave})
    for version, wave in enumerate(waves):
        if version:
            seen.change(engine, version - 1)
        refit(engine, weights[version % 2], version, recompute)
        engine.add(wave)
        for _ in range(case.steps):
            seen.step(engine)
    while engine.pending:
        seen.step(engine)
    assert seen.done.keys() == seen.asked.keys()
    return seen


def claimed_logprobs(models: list[Checkpoint], request: Request, completion: Completion) -> np.ndarray:
    """Return [C] log-probs, each token's by its span's version, which gets the whole prefix."""
    temperature, start, parts = request.sampling.temperature, 0, []
    for span in completion.spans:
        of_all = models[span.version % 2].logprobs(request.tokens, completion.tokens, temperature)
        parts.append(of_all[start : start + span.tokens])
        start += span.tokens
    return np.concatenate(parts)


def kept_logprobs(models: list[Checkpoint], request: Request, completion: Completion, fed: list[tuple[int, int]]) -> np.ndarray:
    """Return [C] log-probs with the kept keys and values of each version that computed them."""
    tokens = torch.from_numpy(np.concatenate([request.tokens, completion.tokens])).long()[None]
    last = completion.spans[-1].version
    past, start, parts = None, 0, []
    for version, end in [*((v, n) for v, n in fed if v < last), (last, tokens.shape[1] - 1)]:
        if end > start:
            with torch.no_grad():
                out = models[version % 2].model(tokens[:, start:end], past_key_values=past, use_cache=True)
            parts.append(out.logits[0])
            past, start = out.past_key_values, end
    logits = torch.cat(parts)[len(request.tokens) - 1 :] / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(completion.tokens).long()[:, None])[:, 0].numpy()


def claimed_difference(models: list[Checkpoint], seen: Seen) -> np.ndarray:
    """Return [tokens], all completions' log-probs minus those of the claimed versions."""
    pairs = [(c.logprobs, claimed_logprobs(models, seen.asked[c.id], c)) for c in seen.done.values()]
    return np.concatenate([abs(ours - theirs) for ours, theirs in pairs])


def kept_difference(models: list[Checkpoint], seen: Seen) -> np.ndarray:
    """Return [tokens], the same with kept keys and values, without preempted requests, whose cache was recomputed."""
    done = [c for c in seen.done.values() if c.id not in seen.preempted]
    pairs = [(c.logprobs, kept_logprobs(models, seen.asked[c.id], c, seen.fed.get(c.id, []))) for c in done]
    return np.concatenate([abs(ours - theirs) for ours, theirs in pairs])
