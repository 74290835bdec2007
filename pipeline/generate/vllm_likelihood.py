"""Score texts with vLLM: compute the hidden states of each distinct prefix once, and logits only to score tokens.

vLLM's own prompt log-probs compute logits for every token of a prompt, request by request, and do not use the prefix cache. So
here the prompts of a unit run as plain requests of one token, which read the cache. The hidden states are taken where vLLM
would compute prompt log-probs. The cache is reset before each unit, so every cached block comes from a prompt of the unit, and
no state is missing. The scheduler sees the same prompts in the same order each time, so the results of a unit are equal to the
last bit (on GPUs with policy.deterministic).

vLLM has two model runners, whose methods for this have different names: V2 on GPUs, V1 elsewhere and with pipeline stages. Both
methods are private; the version is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed import get_pp_group
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from pipeline.generate.likelihood_plan import ScoringPlan, scoring_plan, split
from pipeline.types import Likelihood, LikelihoodRequest

_LOGITS = 1 << 24  # of one batch of rows; bounds the memory beside vLLM's own
_SALT = "likelihood"  # keeps these blocks apart from those of generation


class _States(NamedTuple):
    """Successive hidden states of one request in a batch."""

    request: str  # vLLM's own id
    position: int  # of the first, in the prompt
    row: int  # of the first, in the batch
    count: int


def likelihoods(engine: LLMEngine, runner: Any, model: Any, requests: Sequence[LikelihoodRequest]) -> list[Likelihood]:
    """Return the likelihoods of a unit. No request is pending. Collective over the engine's ranks."""
    plan = scoring_plan(requests)
    scorer = _LikelihoodScorer(plan, model.compute_logits, max(1, _LOGITS // engine.model_config.get_vocab_size()))
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not reset its prefix cache")
    # ignore_eos and no tokenizer: the one token that vLLM insists on drawing is not looked at.
    parameters = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
    with _hidden_states(runner, scorer.score):
        for i, (prompt, prefixes) in enumerate(zip(plan.prompts, plan.prefixes, strict=True)):
            id = engine.add_request(str(i), tokens_input(prompt.tolist(), cache_salt=_SALT), parameters)
            scorer.prefixes[id] = prefixes
        while engine.has_unfinished_requests():
            engine.step()
    stages = get_pp_group()
    scores = scorer.scores() if stages.is_last_rank else torch.zeros(2, len(plan.tokens), dtype=torch.float64)
    if stages.world_size > 1:
        scores = stages.broadcast(scores.to(stages.device), src=stages.world_size - 1).cpu()
    return split(requests, scores[0].numpy().astype(np.float32), scores[1].numpy() > 0)


class _LikelihoodScorer:
    """Scores tokens as the hidden states before them arrive."""

    def __init__(self, plan: ScoringPlan, compute_logits: Callable[[torch.Tensor], torch.Tensor], most_rows: int) -> None:
        """Prepare to score a plan's tokens. most_rows: maximum rows of logits to compute at once."""
        self.prefixes: dict[str, np.ndarray] = {}  # by vLLM's id of the request
        self._plan, self._compute_logits, self._most_rows = plan, compute_logits, most_rows
        self._left = np.diff(plan.starts) > 0  # [prefixes] bool: it scores tokens, and its state has not come
        self._places: list[np.ndarray] = []  # of the tokens scored so far
        self._scores: list[torch.Tensor] = []  # for each of those, float64 [2, tokens]: log-prob, and 1 if greedy

    def score(self, hidden: torch.Tensor, batch: Sequence[_States]) -> None:
        """Score all tokens that follow the hidden states of a batch. hidden: [rows, hidden size]."""
        rows, prefixes = [], []
        for part in batch:
            part_prefixes = self.prefixes[part.request][part.position : part.position + part.count]
            unscored = np.flatnonzero(self._left[part_prefixes])
            self._left[part_prefixes[unscored]] = False
            rows.append(part.row + unscored)
            prefixes.append(part_prefixes[unscored])
        if not rows:
            return
        all_rows, all_prefixes = torch.from_numpy(np.concatenate(rows)).to(hidden.device), np.concatenate(prefixes)
        for start in range(0, len(all_prefixes), self._most_rows):
            chosen = slice(start, start + self._most_rows)
            self._take(self._compute_logits(hidden[all_rows[chosen]]).float(), all_prefixes[chosen])

    def _take(self, logits: torch.Tensor, prefixes: np.ndarray) -> None:
        """Score the tokens after these prefixes. logits: [prefixes, vocabulary] float32."""
        positions, indices = self._plan.score_indices(prefixes)
        tokens = torch.from_numpy(self._plan.tokens[positions]).to(logits.device)
        rows = torch.from_numpy(indices).to(logits.device)
        logprobs = logits[rows, tokens] - logits.logsumexp(-1)[rows]
        greedy = logits.argmax(-1)[rows] == tokens
        self._places.append(positions)
        self._scores.append(torch.stack([logprobs.double(), greedy.double()]))

    def scores(self) -> torch.Tensor:
        """Return [2, E] float64: the log-probs of all scored tokens, then 1 for greedy tokens and 0 for other tokens.

        Raises RuntimeError if a token is not scored.
        """
        if missing := int(self._left.sum()):
            raise RuntimeError(f"vLLM computed no hidden state for {missing} of {len(self._left)} prefixes")
        scores = torch.zeros(2, len(self._plan.tokens), dtype=torch.float64)
        if self._places:
            scores[:, torch.from_numpy(np.concatenate(self._places))] = torch.cat(self._scores, 1).cpu()
        return scores


@contextmanager
def _hidden_states(runner: Any, receive: Callable[[torch.Tensor, list[_States]], None]) -> Iterator[None]:
    """Pass the final hidden states of each batch to `receive`, on the ranks that compute logits."""

    def from_v1(hidden: torch.Tensor, scheduled: dict[str, int]) -> dict:
        if get_pp_group().is_last_rank:
            begins, index_of = runner.query_start_loc.np, runner.input_batch.req_id_to_index
            receive(
                hidden,
                [
                    _States(id, runner.requests[id].num_computed_tokens, int(begins[index_of[id]]), count)
                    for id, count in scheduled.items()
                ],
            )
        return {}

    def from_v2(_logits: Any, hidden: torch.Tensor, batch: Any, *_: Any) -> dict:
        columns = (batch.req_ids, batch.num_computed_prefill_tokens_np, batch.query_start_loc_np, batch.num_scheduled_tokens)
        receive(hidden, [_States(id, *map(int, numbers)) for id, *numbers in zip(*columns, strict=False)])
        return {}

    if hasattr(runner, "prompt_logprobs_worker"):
        owner, name, replacement = runner.prompt_logprobs_worker, "compute_prompt_logprobs", from_v2
    else:
        owner, name, replacement = runner, "_get_prompt_logprobs_dict", from_v1
    if owner is None:  # an earlier pipeline stage
        yield
        return
    setattr(owner, name, replacement)  # hides the class's method
    try:
        yield
    finally:
        delattr(owner, name)
