"""Generation with a Hugging Face model: continuous batching over dense rows. vLLM is tested against this reference.

Every `step` first admits waiting requests, in order, up to `max_num_seqs` rows, then draws one token for every row. A finished
row is removed at once and the last row takes its place, so the batch is always as wide as the number of running requests. Equal
prompts are prefilled once: the other requests copy the first one's keys and values, even if they are admitted while it is
running, but never across versions of the weights. A prefill covers all but the prompt's last token, which is the input of the
row's first decode step; so tokens are drawn in only one place. New weights may arrive while rows run: their keys and values are
kept, or recomputed by a prefill of all their tokens.

Not supported: prefix sharing between different prompts, tensor parallelism, attention other than full (see `kv_cache.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from typing_extensions import override

from pipeline.boxes import Piece, region, whole
from pipeline.config import PolicyConfig
from pipeline.config.generation import MOST_SEQUENCES
from pipeline.data.stop_strings import StopStrings
from pipeline.data.stop_tokens import stop_tokens
from pipeline.generate.engine_state import EngineState, MemoryPart
from pipeline.generate.generate_backend import GenerateBackend, UpdateUnit, WeightUpdate
from pipeline.generate.kv_cache import ATTENTION, RowCache
from pipeline.generate.request_limits import check_likelihoods, check_pending, new_token_limit
from pipeline.generate.sampling import sample
from pipeline.generate.weight_checks import checked_weights
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.models.recorded_layout import Shape
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Completion, Likelihood, LikelihoodRequest, Request, VersionSpan

_PREFILL_TOKENS = 16384  # of one forward, padding included; bounds the memory of activations
_LOGITS = 1 << 26  # of one forward for likelihoods, unless a single text has more


@dataclass(slots=True)
class _Row:
    """A running sequence: the prompt, then `tokens`. The cache holds all of it but the last token."""

    request: Request
    limit: int  # of new tokens
    stop: frozenset[int]
    length: int  # tokens in the cache
    last: int  # the input of the next step
    prefilled_by: int  # the version of the weights that computed the prompt's keys and values
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)  # tokens drawn by earlier weights

    def cached_tokens(self) -> np.ndarray:
        """Return the tokens in the cache, [length] int32."""
        return np.concatenate([self.request.tokens, np.array(self.tokens, np.int32)])[: self.length]

    def all_spans(self, version: int) -> tuple[VersionSpan, ...]:
        """Return the version spans of all drawn tokens: `spans`, then one of `version` for the tokens after them."""
        newest = len(self.tokens) - sum(span.tokens for span in self.spans)
        return (*self.spans, VersionSpan(version, newest)) if newest else tuple(self.spans)


class _Update(WeightUpdate):
    """An update that writes the model's tensors in place."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        shapes: dict[str, Shape],
        tied: dict[str, str],
        serve: Callable[[int, bool], None],
    ) -> None:
        self._tensors, self._shapes, self._tied, self._serve = tensors, shapes, tied, serve
        self._missing = set(shapes)

    @torch.no_grad()
    @override
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in checked_weights(weights, self._shapes, self._tied):
            self._tensors[name].copy_(tensor)
            self.finish(name)

    @override
    def target(self, unit: str, tensor: str) -> torch.Tensor:
        return self._tensors[tensor]

    @override
    def in_place(self, unit: str) -> bool:
        return True

    @override
    def finish(self, unit: str) -> None:
        self._missing.discard(unit)

    @override
    def commit(self, version: int, recompute_kv_cache: bool = True) -> None:
        if self._missing:
            raise RuntimeError(f"commit: {len(self._missing)} tensors were not written; the first is '{min(self._missing)}'")
        self._serve(version, recompute_kv_cache)


@dataclass(frozen=True, slots=True)
class _Draws:
    """The sampling parameters of all R rows on the device, in the form that `sample` takes."""

    temperature: torch.Tensor | None  # [R] float32
    seeds: torch.Tensor  # [R] int64
    top_k: torch.Tensor | None  # [R] int64
    top_p: torch.Tensor | None  # [R] float32


class TransformersBackend(GenerateBackend):
    """One engine on one device: the current CUDA device, or the CPU if there is none."""

    def __init__(self, policy: PolicyConfig) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        config = model_config(policy)
        self._shapes, self._tied = checkpoint_shapes(config)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            model = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, policy.precision), attn_implementation=ATTENTION, trust_remote_code=False
            )
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._tensors = {name: tensor for name, tensor in model.state_dict().items() if name in self._shapes}
        if absent := self._shapes.keys() - self._tensors.keys():
            message = (
                f"got transformers; expected vllm for {policy.model_name}, where the library transformers stores"
                f" '{min(absent)}' fused with other tensors"
            )
            raise RecipeError(Problem("policy.generation.backend", "unsupported", message))
        self._eos = stop_tokens(policy).ids
        self._stop_strings = StopStrings(policy.tokenizer)
        self._max_rows = policy.generation.max_num_seqs or MOST_SEQUENCES
        self._max_model_len = policy.generation.vllm_cfg.max_model_len
        self._version = -1  # no weights yet
        self._state = EngineState()
        self._waiting: deque[tuple[Request, int]] = deque()
        self._rows: list[_Row] = []
        self._draws: _Draws | None = None  # of the current rows; None: outdated
        self._cache = RowCache()
        self._kept: dict[str, torch.Tensor] = {}  # copies on the host while the engine sleeps
        self.prefilled_tokens = 0  # total; equal prompts count once, and once more for each update that recomputes them

    @property
    @override
    def pending(self) -> int:
        return len(self._waiting) + len(self._rows)

    @property
    @override
    def max_num_seqs(self) -> int:
        return self._max_rows

    @override
    def add(self, requests: list[Request]) -> None:
        self._state.check_serves()
        self._waiting.extend([(request, new_token_limit(request, self._max_model_len)) for request in requests])

    @torch.inference_mode()
    @override
    def step(self) -> list[Completion]:
        self._state.check_serves()
        if self._waiting and len(self._rows) < self._max_rows:
            self._admit()
        if not self._rows:
            return []
        self._decode()
        ended = {i: end for i, row in enumerate(self._rows) if (end := self._end(row))}
        completions = [self._completion(self._rows[i], *end) for i, end in ended.items()]
        self._remove(list(ended))
        return completions

    def _end(self, row: _Row) -> tuple[str, str] | None:
        """Return (finish, stop) of the completion if the row's last token ends it; None if it continues."""
        strings = row.request.sampling.stop
        if strings and (match := self._stop_strings.find(row.tokens, 1, strings)):
            return "stop", match.string
        if row.last in row.stop:
            return "stop", ""
        return ("length", "") if len(row.tokens) == row.limit else None

    @torch.inference_mode()
    @override
    def cut(self, ids: list[str]) -> list[Completion]:
        self._state.check_serves()
        row_of = {row.request.id: row_number for row_number, row in enumerate(self._rows)}
        waiting = {request.id for request, _ in self._waiting}
        check_pending(ids, row_of.keys() | waiting)
        empty = Completion("", np.zeros(0, np.int32), np.zeros(0, np.float32), (), "length")
        completions = [
            self._completion(self._rows[row_of[id]], "length") if id in row_of else replace(empty, id=id) for id in ids
        ]
        self._remove(sorted({row_of[id] for id in ids if id in row_of}))
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0].id not in set(ids))
        return completions

    @torch.inference_mode()
    @override
    def likelihoods(self, requests: Sequence[LikelihoodRequest]) -> list[Likelihood]:
        self._state.check_serves()
        check_likelihoods(requests, self._max_model_len, self.pending)
        scored: dict[int, Likelihood] = {}
        vocab_size = self._model.config.get_text_config().vocab_size
        for batch in _batches([len(request.tokens) for request in requests], _LOGITS // vocab_size):
            scored |= zip(batch, self._score([requests[i] for i in batch]), strict=True)
        return [scored[i] for i in range(len(requests))]

    def _score(self, requests: list[LikelihoodRequest]) -> list[Likelihood]:
        """Return the likelihoods of one batch. The last token of a request is scored, but is not an input."""
        inputs = np.zeros(
            (len(requests), max(len(request.tokens) for request in requests) - 1), np.int64
        )  # padded on the right
        for row, request in zip(inputs, requests, strict=True):
            row[: len(request.tokens) - 1] = request.tokens[:-1]
        skipped = min(request.first for request in requests) - 1  # no logits before it
        positions = torch.arange(inputs.shape[1], device=self._device)
        logits = self._model(
            input_ids=torch.from_numpy(inputs).to(self._device),
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[skipped:],
        ).logits.float()
        best, totals = logits.argmax(-1), logits.logsumexp(-1)  # each [R, length - kept]
        likelihoods = []
        for row, request in enumerate(requests):
            span = slice(request.first - 1 - skipped, len(request.tokens) - 1 - skipped)
            tokens = torch.from_numpy(np.asarray(request.tokens[request.first :], np.int64)).to(self._device)
            logprobs = logits[row, span].gather(-1, tokens[:, None])[:, 0] - totals[row, span]
            greedy = best[row, span] == tokens
            likelihoods.append(Likelihood(request.id, logprobs.cpu().numpy(), greedy.cpu().numpy()))
        return likelihoods

    @override
    def progress(self) -> dict[str, tuple[VersionSpan, ...]]:
        running = {row.request.id: row.all_spans(self._version) for row in self._rows}
        return running | {request.id: () for request, _ in self._waiting}

    @property
    @override
    def shapes(self) -> dict[str, Shape]:
        return self._shapes

    @override
    def layout(self) -> list[UpdateUnit]:
        pieces = {name: Piece(name, whole(shape), whole(shape)) for name, shape in self._shapes.items()}
        return [UpdateUnit(name, (region(piece, name, self._tensors[name].stride()),)) for name, piece in pieces.items()]

    @override
    def update(self) -> _Update:
        self._state.begin_update()
        return _Update(self._tensors, self._shapes, self._tied, self._serve)

    @torch.inference_mode()
    def _serve(self, version: int, recompute_kv_cache: bool) -> None:
        for row in self._rows:
            row.spans = list(row.all_spans(self._version))
            if recompute_kv_cache:
                row.prefilled_by = version
        if recompute_kv_cache:
            self._prefill([index for index, row in enumerate(self._rows) if row.length])
            self._draws = None  # the prefill has overwritten the cache's `rows`
        self._version = version
        self._state.commit()

    @override
    def sleep(self, keep_weights: bool = False) -> None:
        self._state.sleep(keep_weights, self.pending)
        self._cache = RowCache()
        self._kept = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()} if keep_weights else {}
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @override
    def wake(self, part: MemoryPart) -> None:
        self._state.wake(part)
        if part == "cache":  # allocated on use
            return
        for tensor in self._tensors.values():
            tensor.untyped_storage().resize_(tensor.nbytes)
        for name, tensor in self._kept.items():
            self._tensors[name].copy_(tensor)
        self._kept = {}

    def close(self) -> None:
        """Drop the model and the cache."""
        del self._model, self._tensors, self._cache

    def _admit(self) -> None:
        """Move waiting requests to rows, and fill those rows' caches with all but the last token of their prompts."""
        present = (index_row for index_row in enumerate(self._rows) if index_row[1].prefilled_by == self._version)
        owners = {row.request.tokens.tobytes(): index for index, row in present}
        fresh, copies = [], []
        while self._waiting and len(self._rows) < self._max_rows:
            request, limit = self._waiting.popleft()
            index, prompt = len(self._rows), np.asarray(request.tokens, dtype=np.int32)
            stop = frozenset((*self._eos, *request.sampling.stop_token_ids))
            self._rows.append(_Row(request, limit, stop, len(prompt) - 1, int(prompt[-1]), prefilled_by=self._version))
            owner = owners.setdefault(prompt.tobytes(), index)
            if len(prompt) > 1:
                fresh.append(index) if owner == index else copies.append((owner, index))
        self._draws = None
        self._cache.reserve(len(self._rows), max(row.length for row in self._rows) + 1)
        self._prefill(fresh)
        if copies:
            sources, targets = zip(*copies, strict=True)
            self._cache.copy(list(sources), list(targets), max(self._rows[index].length for index in targets))

    def _prefill(self, indices: list[int]) -> None:
        """Compute the keys and values of all cached tokens of these rows. Each row has at least one."""
        for batch in _batches([self._rows[index].length for index in indices], _PREFILL_TOKENS):
            self._forward([indices[i] for i in batch])

    def _forward(self, indices: list[int]) -> None:
        lengths = [self._rows[index].length for index in indices]
        tokens = np.zeros((len(indices), max(lengths)), dtype=np.int64)  # padded on the right, where causal attention hides it
        for row, index, length in zip(tokens, indices, lengths, strict=True):
            row[:length] = self._rows[index].cached_tokens()
        self._cache.rows, self._cache.positions = torch.tensor(indices, device=self._device), None
        inputs = torch.from_numpy(tokens).to(self._device)
        positions = torch.arange(tokens.shape[1], device=self._device)[None]
        self._model.base_model(input_ids=inputs, position_ids=positions, past_key_values=self._cache, use_cache=True)
        self.prefilled_tokens += sum(lengths)

    def _decode(self) -> None:
        """Feed each row's last token and draw its next one."""
        rows, cache = self._rows, self._cache
        if self._draws is None:
            self._draws = self._make_draws()
            cache.rows = torch.arange(len(rows), device=self._device)
        lengths = [row.length for row in rows]
        inputs = torch.tensor([[row.last for row in rows], lengths, [len(row.tokens) for row in rows]], device=self._device)
        last, positions, drawn = inputs  # each [R] int64
        cache.positions, cache.length = positions, max(lengths) + 1
        cache.reserve(len(rows), cache.length)
        mask = None
        if min(lengths) != max(lengths):
            mask = (torch.arange(cache.length, device=self._device) <= positions[:, None])[:, None, None]
        logits = self._model(
            input_ids=last[:, None], position_ids=positions[:, None], attention_mask=mask, past_key_values=cache, use_cache=True
        ).logits
        draws = self._draws
        tokens, logprobs = sample(logits[:, -1], draws.temperature, draws.seeds, drawn, draws.top_k, draws.top_p)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.length += 1
            row.last = token

    def _make_draws(self) -> _Draws:
        samplings = [row.request.sampling for row in self._rows]
        greedy = all(s.temperature == 0 for s in samplings)
        cut = any(s.top_k or s.top_p < 1 for s in samplings)
        vocab_size = self._model.config.get_text_config().vocab_size
        return _Draws(
            temperature=None if greedy else torch.tensor([s.temperature for s in samplings], device=self._device),
            seeds=torch.tensor([row.request.seed for row in self._rows], device=self._device),
            top_k=torch.tensor([s.top_k or vocab_size for s in samplings], device=self._device) if cut else None,
            top_p=torch.tensor([s.top_p for s in samplings], device=self._device) if cut else None,
        )

    def _remove(self, ended: list[int]) -> None:
        """Remove the rows with the indices `ended`, in ascending order. The last remaining rows fill the gaps."""
        if not ended:
            return
        rows = self._rows
        remaining = len(rows) - len(ended)
        holes = [index for index in ended if index < remaining]
        gone = set(ended)
        movers = [index for index in range(remaining, len(rows)) if index not in gone]
        if movers:
            self._cache.copy(movers, holes, max(rows[index].length for index in movers))
        for mover, hole in zip(movers, holes, strict=True):
            rows[hole] = rows[mover]
        del rows[remaining:]
        self._draws = None

    def _completion(self, row: _Row, finish: str, stop: str = "") -> Completion:
        return Completion(
            id=row.request.id,
            tokens=np.array(row.tokens, dtype=np.int32),
            logprobs=np.array(row.logprobs, dtype=np.float32),
            spans=row.all_spans(self._version),
            finish=finish,
            stop=stop,
        )


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the indices of all sequences in batches of at most `most` tokens with padding, or of one sequence.

    Similar lengths are together, for less padding.
    """
    queue = sorted(range(len(lengths)), key=lengths.__getitem__)
    while queue:
        count = 1
        while count < len(queue) and (count + 1) * lengths[queue[count]] <= most:
            count += 1
        yield queue[:count]
        del queue[:count]
