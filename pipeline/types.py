"""The types that parts of the pipeline pass to each other.

    Prompt -> Completion -> Turn -> Rollout -> RolloutGroup -> Sample -> PackedBatch -> LossOutput -> StepResult

Everything up to `Sample` is numpy and plain Python, so that it can cross between ranks as a message; tensors begin at
`PackedBatch`. Nothing is padded: sequences lie one after another and `cu_seqlens` says where each begins.

Alignment, everywhere: entry t of a per-token field belongs to token t. `logprobs[t]` is log p(tokens[t] | tokens[<t]), so the
first token of a sequence has none; its entry is 0 and its mask is False.

Worked example, prompt [5, 6], completion [7, 2]:
    Sample.tokens    [5, 6, 7, 2]
    Sample.loss_mask [F, F, T, T]
    Sample.logprobs  [0, 0, log p(7|5,6), log p(2|5,6,7)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch


Head = Literal["logprobs", "values"]
"""A model's head: log-probabilities over the vocabulary, or one value per token (a critic, a reward model)."""


NO_EXPERT = -1
"""Number of an expert that no engine recorded: the router of the trained model chooses."""
NO_TOKEN = -1
"""Token id that stands where there is no token."""


LARGEST_REWARD = 1e15
"""Rewards and scores are at most this far from 0, so that sums of their squares over a batch are finite in float32."""
REWARDS = f"a number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}"


REWARD = "reward/"
"""Prefix of an episode's metrics that are rewards of their own. `Rollout.reward` is their weighted sum."""


def is_reward(value: float) -> bool:
    """Return whether a policy can learn from a reward: a finite number within LARGEST_REWARD."""
    return abs(value) <= LARGEST_REWARD


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task: the prompt of the policy, and the data that the environment needs to judge the answer."""

    index: int  # position in the data stream, counted over epochs; unique in a run, part of every sampling seed
    tokens: np.ndarray  # [P] int32
    environment: str  # key under `env` in the recipe; "": no environment judges the answer
    task: dict[str, Any]  # data of the environment, e.g. {"answer": "42"}
    dataset: str = ""  # its name in the recipe; "" if there is only one
    record: int = -1  # number of its record in the data set; -1: unknown


@dataclass(frozen=True, slots=True)
class Thinking:
    """Bounds the number of tokens that the policy thinks before each answer."""

    tokens: int  # at most; then `end_tokens` are inserted
    end: str  # the text that ends thinking
    end_tokens: tuple[int, ...]  # its tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    max_new_tokens: int = 128  # at most; the context may leave room for fewer
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own
    stop: tuple[str, ...] = ()  # texts; the token that completes one ends the completion
    thinking: Thinking | None = None  # of episodes; a request has none


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to sample. Only its seed determines its randomness, so any engine may take it."""

    id: str
    tokens: np.ndarray  # [P] int32, the prompt
    seed: int  # in [0, 2**63)
    sampling: Sampling
    routed: int = 0  # leading tokens whose experts the engine need not return, see Completion.experts


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Successive tokens of a completion that the same weights sampled."""

    version: int  # of the weights
    tokens: int  # how many


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine drew for one request. If a refit follows the third of 5 tokens, spans are (7, 3), (8, 2)."""

    id: str  # the request's
    tokens: np.ndarray  # [C] int32, with the stop token if there was one
    logprobs: np.ndarray  # [C] float32, of the distribution that was sampled from (after temperature)
    spans: tuple[VersionSpan, ...]  # in order; their tokens add up to C
    finish: str  # "stop": ended by a stop token or a stop string; "length": truncated
    stop: str = ""  # the stop string that the last token completes; "" if none. What is judged is the text before it
    experts: np.ndarray | None = None
    """[N, E, K] of integers: the K experts that each of the E layers with experts chose for the N tokens before the last.

    Recorded with policy.router_replay, of the request's tokens from Request.routed on. The last token was never an input.
    """


@dataclass(frozen=True, slots=True)
class LikelihoodRequest:
    """A text whose tokens from `first` on are scored.

    Worked example, tokens [5, 6, 7, 2] and first 2: log p(7|5,6) and log p(2|5,6,7).
    """

    id: str
    tokens: np.ndarray  # [L] int32, at most the engine's max_model_len
    first: int  # in [1, L): the first token has no distribution


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The scores of a request's tokens under the model's own distribution (temperature 1). Entry i is of tokens[first + i]."""

    id: str  # the request's
    logprobs: np.ndarray  # [L - first] float32
    greedy: np.ndarray  # [L - first] bool: no token is more likely


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion of the policy, and the environment's observation after it."""

    completion: Completion
    observation: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [O] int32; empty in the last turn
    thinking: bool = False  # what it thought, with the inserted end as observation; the next turn has the answer
    reward: float = 0.0  # what the environment gave for it; of a turn of thoughts 0
    malformed: bool = False  # the environment could not use it, see Outcome.malformed


@dataclass(frozen=True, slots=True)
class Branch:
    """A conversation of an episode: the tokens before its first turn, and its turns, one after another.

    An agent that rewrites its history, or asks sub-agents, has several. `context` may repeat tokens that the policy sampled in
    another conversation of the episode; the loss counts them only there.
    """

    context: np.ndarray  # [P] int32
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode with its reward. Its turns follow the prompt, one after another.

    Worked example, a turn [7, 2], its observation [9], then a turn [4]: tokens [7, 2, 9, 4], drawn [T, T, F, T].

    The episode of an agent is a tree of turns, which is stored as conversations: `turns`, and `branches` with the turns that
    continue another history. Every sampled token is in one turn of one conversation.
    """

    turns: tuple[Turn, ...]
    reward: float  # of the whole episode, the sum over its turns
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's, e.g. {"accuracy": 1.0}
    failure: str = ""  # why it has no reward: it could not be judged, and is not trained on
    broke: str = ""  # how the answer made its environment fail, which counts as a wrong answer
    extracted: str = ""  # the answer that the environment found in the last turn; "": none
    notes: dict[str, str] = field(default_factory=dict)  # the environment's texts about the last turn
    context: np.ndarray | None = None  # [P] int32, the tokens before the first turn; None: the prompt's
    branches: tuple[Branch, ...] = ()  # the episode's other conversations

    def conversations(self, prompt: Prompt) -> tuple[Branch, ...]:
        """Return all conversations of the episode, first the one of `turns`."""
        return (Branch(prompt.tokens if self.context is None else self.context, self.turns), *self.branches)

    @property
    def all_turns(self) -> tuple[Turn, ...]:
        """The turns of all conversations."""
        return (*self.turns, *(turn for branch in self.branches for turn in branch.turns))

    @property
    def tokens(self) -> np.ndarray:
        """[C] int32: all tokens of `turns`."""
        return _join([part for turn in self.turns for part in (turn.completion.tokens, turn.observation)], np.int32)

    @property
    def drawn(self) -> np.ndarray:
        """[C] bool: True for the policy's tokens."""
        parts = [(turn.completion.tokens, turn.observation) for turn in self.turns]
        return _join([mask for drawn, observed in parts for mask in (np.ones(len(drawn)), np.zeros(len(observed)))], np.bool_)

    @property
    def logprobs(self) -> np.ndarray:
        """[C] float32: 0 for tokens that the policy did not sample."""
        parts = [(turn.completion.logprobs, np.zeros(len(turn.observation))) for turn in self.turns]
        return _join([part for pair in parts for part in pair], np.float32)

    @property
    def drawn_tokens(self) -> int:
        """The number of tokens that the policy sampled in all conversations."""
        return sum(len(turn.completion.tokens) for turn in self.all_turns)

    @property
    def answers(self) -> int:
        """The number of turns of all conversations; the policy's thoughts and the answer after them count as one turn."""
        others = sum(not turn.thinking for branch in self.branches for turn in branch.turns)
        return sum(not turn.thinking for turn in self.turns[:-1]) + bool(self.turns) + others

    @property
    def judged_turns(self) -> tuple[Turn, ...]:
        """The turns without those of thoughts before an answer."""
        return (*(turn for turn in self.turns[:-1] if not turn.thinking), *self.turns[-1:])

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The spans of the drawn tokens of all conversations, in order."""
        return tuple(span for turn in self.all_turns for span in turn.completion.spans)

    @property
    def has_failed(self) -> bool:
        """True if the episode could not be judged; False for an episode that was cut before its first token."""
        return self.failure not in ("", NOTHING_SAID)

    @property
    def finish(self) -> str:
        """The `finish` of the last turn; "" if there are no turns."""
        return self.turns[-1].completion.finish if self.turns else ""

    @property
    def stop(self) -> str:
        """The `stop` of the last turn; "" if there are no turns."""
        return self.turns[-1].completion.stop if self.turns else ""


def whole_reward(turns: Sequence[Turn], reward: float) -> tuple[Turn, ...]:
    """Return the turns of an episode that was judged as a whole: its reward is the last turn's, and no other has any."""
    last = len(turns) - 1
    return tuple(replace(turn, reward=reward if place == last else 0.0) for place, turn in enumerate(turns))


NOTHING_SAID = "it was cut before it said anything"
"""The `failure` of a rollout that was cut before its first token. Its environment did not fail."""


def _join(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """A prompt and all its rollouts, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """A sample's text in the M tokens of a teacher with another vocabulary. Chunks are pieces of text, in both tokens.

    A chunk is compared if both models score all of its text; -1 stands for tokens of the other text.
    """

    tokens: np.ndarray  # [M] int32
    chunks: np.ndarray  # [M] int32: the number of each token's chunk
    chunks_of_sample: np.ndarray  # [L] int32: likewise of the sample's tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. L = length of prompt and completion together."""

    tokens: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, True where the loss counts the token
    logprobs: np.ndarray  # [L] float32, by the generate rank that sampled; 0 where the mask is False
    advantages: np.ndarray  # [L] float32; 0 where the mask is False
    # The rollout's; of a pair's chosen answer, its margin over the rejected one, which comes next; of a labeled one, 1 or 0.
    reward: float = 0.0
    teacher: str = ""  # the name of the one of several teachers that scores it
    in_teacher: TeacherTokens | None = None  # None: its teacher reads its tokens
    experts: np.ndarray | None = None  # [N, E, K]: see Completion.experts, of the first N tokens; NO_EXPERT for none
    branches: tuple[Sample, ...] = ()  # of the episode's other conversations, with the same advantage; see Rollout.branches

    @property
    def tokens_of_teacher(self) -> np.ndarray:
        """The tokens that the sample's teacher reads, [M] int32."""
        return self.tokens if self.in_teacher is None else self.in_teacher.tokens


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """The counts of one optimizer step over all ranks and microbatches; every loss divides by them."""

    tokens: int  # with a True mask
    sequences: int  # with at least one such token
    good: int = 0  # of these, with a reward above 0


@dataclass(frozen=True, slots=True)
class DataParallelRank:
    """A train rank's position among the data-parallel ranks; tensor-parallel peers have the same position."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Update:
    """One data-parallel rank's share of one optimizer step. A microbatch is a list of positions in `samples`."""

    samples: list[Sample]
    train: list[list[int]]  # microbatches with a gradient
    forward: list[list[int]]  # microbatches without one, which may be larger
    counts: GlobalCounts
    taught: dict[str, list[list[int]]] = field(default_factory=dict)  # by teacher, as `forward`; empty: one teacher scores all


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over the advantages of the counted tokens of one update on one data-parallel rank."""

    sum: float
    squares: float  # the sum of their squares
    counts: GlobalCounts  # of this rank


@dataclass(frozen=True, slots=True)
class AdvantageNormalization:
    """The normalization (A - mean) * scale of a step's advantages, and the counts by which its updates then divide."""

    mean: float
    scale: float
    counts: list[GlobalCounts]  # one per update


@dataclass(frozen=True, slots=True)
class TopK:
    """K tokens and their log-probabilities. Entry t is of the distribution from which token t was drawn."""

    tokens: torch.Tensor  # [T, K] int64
    logprobs: torch.Tensor  # [T, K] float32, of the whole distribution, so their probabilities do not add up to 1


@dataclass(frozen=True, slots=True)
class Outputs:
    """A model's outputs for each token of a batch.

    Where a sequence begins there is no distribution: its entries are 0. So are those of tokens outside of `PackedBatch.wanted`.
    """

    logprobs: torch.Tensor | None = None  # [T] float32; -inf for tokens that truncated sampling excludes
    entropy: torch.Tensor | None = None  # [T] float32, of the distribution that token t was drawn from
    top_k: TopK | None = None
    values: torch.Tensor | None = None  # [T] float32, the value head's on the state *after* token t
    full_logprobs: torch.Tensor | None = None  # [T] float32, before top-p and top-k; only where sampling is truncated

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are set, always in the same order."""
        top_k = [self.top_k.tokens, self.top_k.logprobs] if self.top_k else []
        return [t for t in (self.logprobs, self.entropy, self.values, self.full_logprobs, *top_k) if t is not None]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One microbatch: S sequences laid end to end, T tokens in all. On the backend's device."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, restarting at 0 in each sequence
    cu_seqlens: torch.Tensor  # [S+1] int32, cu_seqlens[0] == 0 and cu_seqlens[S] == T
    lengths: tuple[int, ...]  # the S lengths, on the host, so that no kernel waits for them
    loss_mask: torch.Tensor  # [T] bool
    generate_logprobs: torch.Tensor  # [T] float32
    advantages: torch.Tensor  # [T] float32
    rewards: torch.Tensor  # [S] float32, see Sample.reward
    mean_kl: float = 0.0  # KL(pi || pi_ref) of the step's mismatched answers, see Needs.mismatched
    wanted: np.ndarray | None = None  # [T] bool: the tokens whose log-probs a loss can read; None: all
    prompts: tuple[
        tuple[int, int], ...
    ] = ()  # [S] (the first sequence with the same prompt, tokens of the prompt); (): unknown
    old_logprobs: torch.Tensor | None = None  # [T] float32, by the policy before this step's first update
    old_full_logprobs: torch.Tensor | None = None  # [T] float32, likewise; see Outputs.full_logprobs
    old_entropy: torch.Tensor | None = None  # [T] float32, likewise, of the distribution of token t
    reference_logprobs: torch.Tensor | None = None  # [T] float32, by the frozen reference policy; never truncated
    old_values: torch.Tensor | None = None  # [T] float32, by the critic before this step's first update; after token t
    returns: torch.Tensor | None = None  # [T] float32: the target of the critic's value *before* token t
    teacher: TopK | None = None  # the teacher's most likely tokens; -1 for none, see universal_logits.candidates
    teacher_logprobs: torch.Tensor | None = None  # [T] float32, by the sample's teacher, of the token's chunk
    chunks: torch.Tensor | None = None  # [T] int64: the first token of each token's chunk; None: each token is a chunk
    teachers: tuple[str, ...] = ()  # [S] the names of the samples' teachers, see Sample.teacher
    experts: torch.Tensor | None = None  # [T, E, K] int32, see Sample.experts; the policy's routers choose them
    balance: torch.Tensor | None = None  # [S] float32: weights of load-balancing losses (load_balancing.py); None: no such loss


# The bins of a `_histogram` metric, over log x: 20 per decade of |log x|, and one around 0, for x equal to 1 up to rounding.
BIN_EDGES = np.concatenate([-np.geomspace(10, 1e-6, 141), np.geomspace(1e-6, 10, 141)])  # the outermost bins are open
BINS = len(BIN_EDGES) + 1


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A microbatch's share of the loss and of each metric: sums over its tokens, already divided by the global count.

    Shares add up over microbatches and data-parallel ranks; a metric whose name ends in `_max` or `_min` is combined by max or
    min. Three kinds are vectors, which add up; pipeline/train/outputs.py converts them to numbers:
        X_histogram  [BINS]: the share of tokens whose log x is in each bin; becomes the quantiles X_p01, X_p50, X_p99 of x
        X_moments    [4]: means of a, a^2, b, b^2; becomes X = 1 - Var b / Var a
        X_weighted   [2]: a sum and its weight; becomes X = sum / weight, nan where no rank has any
    """

    loss: torch.Tensor  # [] float32, with a graph
    metrics: dict[str, torch.Tensor]  # each float32, detached


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step, the same on every rank of the train component."""

    metrics: dict[str, float]  # the loss's metrics and loss, grad_norm, lr


@dataclass(frozen=True, slots=True)
class ServedAdapters:
    """The adapters of a policy whose refits deliver adapters alone (policy.generation.lora_refit=adapter)."""

    dim: int
    alpha: float
    rslora: bool  # the scale is alpha / sqrt(dim) rather than alpha / dim
    shapes: dict[str, tuple[int, ...]]  # of A and B, by their names (pipeline/train/adapters/spec.py)
