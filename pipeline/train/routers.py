"""The routers of a Hugging Face policy: router replay (policy.router_replay) and load balancing (load_balancing.py).

An engine and a trainer round differently, so their routers can choose other experts for the same token. Then log-probs differ
by far more than rounding, and importance weights with them (R3, https://arxiv.org/abs/2510.11370). With replay only the choice
comes from the engine: weights of the chosen experts, and their gradients, come from the trained router.

Each of transformers' routers chooses with `torch.topk(scores, k)` over all experts of a token. Within a layer's mixture, replay
changes the result of this call to the recorded experts and their scores. It does the same when the backward pass recomputes a
layer, since no other batch is computed in between. The load-balancing loss takes the probabilities of experts from the same
call, and from the softmax or sigmoid of all experts' logits before it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from typing_extensions import override

from pipeline.recipe.problems import Problem, RecipeError
from pipeline.train.context_parallel import LocalBatch
from pipeline.train.expert_parallel import expert_modules
from pipeline.train.load_balancing import BalancedRows, LoadBalancing
from pipeline.types import NO_EXPERT


def refusal(coefficient: float, reason: str) -> RecipeError:
    """Return the error of a model whose routers cannot be balanced or, if the coefficient is 0, not be replayed."""
    key, got, expected = "policy.router_replay.enabled", "true", "false"
    if coefficient:
        key, got, expected = "policy.moe_aux_loss_coeff", f"{coefficient:g}", "0"
    return RecipeError(Problem(key, "unsupported", f"got {got}, but {reason}; expected {expected}"))


class Routers:
    """The mixtures of experts of a model, and the experts that their tokens go to."""

    def __init__(
        self,
        hf: PreTrainedModel,
        coefficient: float,
        shared: Sequence[dist.ProcessGroup] = (),
        split: dist.ProcessGroup | None = None,
        counts: bool = True,
    ) -> None:
        """Change the mixtures' forward. coefficient: of the load-balancing loss. shared, counts: see `LoadBalancing`.

        split: the ranks that split a sequence's tokens between layers; None: none do.
        Raises RecipeError if transformers does not dispatch the model's experts by token.
        """
        modules = expert_modules(hf)
        if not modules:
            raise refusal(coefficient, f"{type(hf).__name__} has no experts that transformers dispatches by token")
        self._coefficient, self._split = coefficient, split
        shared = [*shared, *([split] if split else [])]
        self.balancing = LoadBalancing(coefficient, len(modules), shared, counts) if coefficient else None
        self._experts: torch.Tensor | None = None
        self._rows: BalancedRows | None = None
        self._in_forward = False
        self._layers = len(modules)
        for layer, (name, experts) in enumerate(modules.items()):
            mixture = hf.get_submodule(name.rpartition(".")[0])
            mixture.forward = functools.partial(self._forward, mixture.forward, layer, int(experts.num_experts))  # pyright: ignore[reportArgumentType]

    @contextlib.contextmanager
    def forward(self, batch: LocalBatch) -> Iterator[None]:
        """Route the tokens of a microbatch within this context, and when a backward pass recomputes it."""
        self._experts, self._rows = routed(batch, self._layers, self._split)
        self._in_forward = True
        yield
        self._in_forward = False

    def _forward(self, forward: Any, layer: int, count: int, *inputs: Any, **options: Any) -> Any:
        recorded = None if self._experts is None else self._experts[:, layer].long()
        rows = self._rows
        if recorded is None and rows is None:
            return forward(*inputs, **options)
        tokens = len(recorded if recorded is not None else rows.sequence)  # pyright: ignore[reportOptionalMemberAccess]
        with _Choice((tokens, count), recorded) as choice:
            output = forward(*inputs, **options)
        if choice.chosen is None:
            raise refusal(self._coefficient, "a router of the model does not choose by torch.topk over all experts")
        if rows is None:
            return output
        assert self.balancing is not None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        visits = torch.zeros(tokens, count, dtype=torch.bool, device=hidden.device).scatter_(1, choice.chosen, True)
        of = (choice.probabilities, visits, choice.chosen.size(1), rows, layer, self._in_forward)
        hidden = self.balancing.attach(hidden, *of)
        return (hidden, *others) if isinstance(output, tuple) else hidden


class _Choice(TorchFunctionMode):
    """Observes the router within this context, and makes it choose the recorded experts, [t, K] int64, if there are any.

    shape: (t, number of experts), that of scores of all experts.
    """

    def __init__(self, shape: tuple[int, int], recorded: torch.Tensor | None) -> None:
        super().__init__()
        self._shape, self._recorded = shape, recorded
        self._activation, self._scores = "", torch.empty(0)
        self.chosen: torch.Tensor | None = None  # [t, K]

    @property
    def probabilities(self) -> torch.Tensor:
        """[t, E]: the router's probabilities of all experts, with a graph."""
        if self._activation == "softmax":
            return self._scores
        if self._activation == "sigmoid":
            return self._scores / (self._scores.sum(-1, keepdim=True) + 1e-20)
        return self._scores.softmax(-1, dtype=torch.float32)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("softmax", "sigmoid") and self.chosen is None and result.shape == self._shape:
            self._activation, self._scores = name, result
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        (scores, *_), (_, chosen) = args, result
        if scores.shape != self._shape or (self._recorded is not None and chosen.shape != self._recorded.shape):
            return result  # a choice among groups of experts
        if not self._activation:
            self._scores = scores
        if self._recorded is not None:
            result = torch.return_types.topk(recorded(self._recorded, scores, chosen))
        self.chosen = result[1]
        return result


def recorded(experts: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, experts), each [t, K]: the recorded experts or, where none are recorded, the router's choice.

    scores: [t, experts], of all experts. chosen: [t, K], the router's choice.
    """
    experts = torch.where(experts == NO_EXPERT, chosen, experts)
    return scores.gather(-1, experts), experts


def routed(batch: LocalBatch, layers: int, split: dist.ProcessGroup | None) -> tuple[torch.Tensor | None, BalancedRows | None]:
    """Return (experts, rows) of the tokens whose states this rank has between layers.

    experts: to replay, [t, E, K]; None: the routers choose. rows: None: no load-balancing loss. layers: number of layers with
    experts. split: the ranks that split a sequence's tokens between layers. Raises ValueError if the engine recorded the
    experts of another number of layers.
    """
    experts, rows = batch.experts, batch.balanced
    if experts is not None and experts.size(1) != layers:
        raise ValueError(f"the engine recorded the experts of {experts.size(1)} layers; the policy has {layers} with experts")
    if split is None:
        return experts, rows
    own = None if experts is None else experts.chunk(split.size())[split.rank()]
    return own, None if rows is None else rows.part(split)
