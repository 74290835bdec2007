"""Compare drawn tokens' log-probs under changing weights with a recomputation by the version that each claims.

python -m tests.generate.in_flight   prints the differences in each case, with recomputed and with kept keys and values
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from pipeline.generate import build
from pipeline.types import Completion, Request, VersionSpan
from tests.generate.tiny import Checkpoint, policy, refit, requests, save

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


def after_a_change(seen: Seen) -> np.ndarray:
    """Return [tokens] bool: whether newer weights drew the token than computed a part of its prefix."""
    oldest = {id: fed[0][0] for id, fed in seen.fed.items() if fed[0][1]}
    spans = [(span, oldest.get(c.id, span.version)) for c in seen.done.values() for span in c.spans]
    return np.concatenate([np.full(span.tokens, span.version > first) for span, first in spans])


def change(models: list[Checkpoint], seen: Seen) -> np.ndarray:
    """Return [tokens], the two models' difference in log-probs."""
    pairs = [(seen.asked[c.id], c) for c in seen.done.values()]
    both = [[m.logprobs(r.tokens, c.tokens, r.sampling.temperature) for r, c in pairs] for m in models]
    return abs(np.concatenate(both[0]) - np.concatenate(both[1]))


def near(model: Checkpoint, other: Checkpoint, share: float) -> Checkpoint:
    """Return its weights, moved by this share towards the other's."""
    moved = copy.deepcopy(model.model)
    with torch.no_grad():
        for ours, theirs in zip(moved.parameters(), other.model.parameters(), strict=True):
            ours.lerp_(theirs, share)
    return Checkpoint(model.folder, moved)


HEADS = """
Of each drawn token: |log-prob - log-prob by the version that its span names, given the whole prefix|.

anew            keys and values made anew at each change: of all tokens
kept            keys and values kept: of the tokens drawn after a change by a request that had begun before it
weights         how far the versions' own log-probs of these tokens are from each other
as kept         kept, against a recomputation in which each version made those keys and values that it made here
over            requests over a change; and of those with kept keys and values:
found           a prefix in vLLM's cache; half: had read a part of the prompt when the weights changed; redone: preempted
near            versions 1 % apart; else two that have nothing in common
"""


def report(name: str, models: list[Checkpoint], anew: Seen, kept: Seen) -> None:
    after, difference = after_a_change(kept), claimed_difference(models, kept)
    counts = [
        after.size,
        sum(len(c.spans) > 1 for c in kept.done.values()),
        len(kept.cached),
        len(kept.partial),
        len(kept.preempted),
    ]
    values = [claimed_difference(models, anew).max(), difference[after].mean(), difference[after].max()]
    values += [change(models, kept)[after].mean(), kept_difference(models, kept).max()]
    print(f"{name:30}", *(f"{count:6}" for count in counts), *(f"{value:12.1e}" for value in values), flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [save(Path(folder) / str(seed), "llama", seed) for seed in (0, 1)]
        print(HEADS)
        counts, values = (
            ["tokens", "over", "found", "half", "redone"],
            ["anew max", "kept mean", "max", "weights mean", "as kept max"],
        )
        print(f"{'':30}", *(f"{head:>6}" for head in counts), *(f"{head:>12}" for head in values))
        for name, case in CASES.items():
            engine = build(policy(models[0].folder, case.backend, **case.settings), 1, 0, 0)
            for kind, pair in {"": models, ", near": [models[0], near(*models, 0.01)]}.items():
                weights = [dict(model.model.state_dict()) for model in pair]
                report(name + kind, pair, *(drive(engine, case, weights, recompute) for recompute in (True, False)))
            engine.close()
        from tests.generate.engine_rank import run  # it imports this module

        (reply, _) = run(Path(folder), *models, {})
        report("vllm, two ranks", models, *(Seen.unpacked(packed, CASES["vllm"]) for packed in reply["in_flight"]))


if __name__ == "__main__":
    main()
