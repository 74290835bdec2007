"""The routers of a pipeline stage of Megatron-Core: see `pipeline/train/routers.py`.

Several microbatches may be between their forward and their backward pass on a pipeline stage. If the backward pass recomputes a
router, it is for the oldest of these microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from pipeline.config import PolicyConfig
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.train.context_parallel import LocalBatch
from pipeline.train.load_balancing import BalancedRows, LoadBalancing
from pipeline.train.megatron.groups import context_group, tensor_group
from pipeline.train.routers import recorded, refusal, routed

OVERRIDES = "policy.megatron_cfg.model_overrides"
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")


class Routing(NamedTuple):
    """The recorded experts and the balanced rows of a microbatch, for one layer."""

    experts: torch.Tensor | None = None  # [t, K] int64, to replay; None: the router chooses
    rows: BalancedRows | None = None  # None: no load-balancing loss


class StageRouters:
    """The routers of a pipeline stage, and the experts that their tokens go to."""

    def __init__(self, stage: torch.nn.Module, parameters: Iterable[str], policy: PolicyConfig) -> None:
        """Change the stage's routers. parameters: names of the parameters of all stages.

        Raises RecipeError if a fused kernel would choose the experts to replay, and for a model without experts.
        """
        coefficient = policy.moe_aux_loss_coeff
        layers = sorted(int(match[1]) for match in map(_ROUTER.fullmatch, parameters) if match)
        if not layers:
            raise refusal(coefficient, "the model has no experts")
        self._layers = len(layers)
        self._split = tensor_group() if stage.config.sequence_parallel else None  # pyright: ignore
        shared = [context_group(), *([self._split] if self._split else [])]
        self.balancing = LoadBalancing(coefficient, self._layers, shared) if coefficient else None
        self._routers: dict[int, _Router] = {}
        for module in stage.modules():
            if isinstance(module, TopKRouter):
                layer = layers.index(module.layer_number - 1)  # pyright: ignore[reportOptionalOperand]
                self._routers[layer] = _Router(module, layer, policy.router_replay.enabled, self.balancing)

    @contextlib.contextmanager
    def forward(self, batch: LocalBatch) -> Iterator[None]:
        """Route the tokens of a microbatch within this context, and when a backward pass recomputes it."""
        experts, rows = routed(batch, self._layers, self._split)
        keep = torch.is_grad_enabled()
        for layer, router in self._routers.items():
            router.begin(Routing(None if experts is None else experts[:, layer].long(), rows), keep)
        yield
        for router in self._routers.values():
            router.end()


class _Router:
    """Replays the experts of one layer, as Megatron-Core's class `RouterReplay` does, and balances their load."""

    def __init__(self, router: TopKRouter, layer: int, replays: bool, balancing: LoadBalancing | None) -> None:
        if replays and router.config.moe_router_fusion:
            message = "got true with policy.router_replay.enabled=true; expected false, since the fused kernel chooses"
            raise RecipeError(Problem(f"{OVERRIDES}.moe_router_fusion", "contradiction", message))
        self._layer, self._balancing = layer, balancing
        self._now = self._used = Routing()
        self._in_forward = self._keeps = False
        self._to_recompute: deque[Routing] = deque()  # of microbatches whose backward pass comes
        if replays:
            router.router_replay = self  # pyright: ignore[reportAttributeAccessIssue]
        router.routing = functools.partial(self._routing, router, router.routing)

    def begin(self, routing: Routing, keep: bool) -> None:
        """Route so from now on. keep: whether a backward pass follows, which may need it again."""
        self._now, self._keeps, self._in_forward = routing, keep, True

    def end(self) -> None:
        """End the forward pass; calls from now on recompute."""
        self._now, self._in_forward = Routing(), False

    def _routing(self, router: TopKRouter, routing: Callable[..., Any], logits: torch.Tensor, padding_mask: Any = None):
        """Return Megatron-Core's (weights, choice), each [t, E], of logits [s, b, E]. Megatron-Core calls it `routing`."""
        if not self._in_forward:
            self._used = self._to_recompute.popleft()
        else:
            self._used = self._now
            if self._keeps and not torch.is_grad_enabled():  # within a checkpoint, whose backward pass calls again
                self._to_recompute.append(self._now)
        weights, choice = routing(logits, padding_mask=padding_mask)
        if self._used.rows is None:
            return weights, choice
        assert self._balancing is not None
        flat = logits.view(-1, logits.size(-1)).float()  # float64 would take twice the memory
        _, probabilities = compute_routing_scores_for_aux_loss(flat, router.topk, router.score_function)
        of = (probabilities, choice.bool(), router.topk, self._used.rows, self._layer, self._in_forward)
        return self._balancing.attach(weights, *of), choice

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts), each [t, topk], of scores [t, experts]."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self._used.experts
        return (values, chosen) if experts is None else recorded(experts, scores, chosen)
