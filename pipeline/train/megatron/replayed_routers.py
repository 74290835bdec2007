"""Router replay (policy.router_replay) in Megatron-Core: see `pipeline/train/router_replay.py`.

Megatron-Core's routers ask an object for each choice. Several microbatches may be between their forward and their backward pass
on a pipeline stage. If the backward pass recomputes a router, it needs the experts of the oldest of these microbatches.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from pipeline.recipe.problems import Problem, RecipeError
from pipeline.train.router_replay import check_layers, recorded

OVERRIDES = "policy.megatron_cfg.model_overrides"
_ROUTER = re.compile(r"decoder\.layers\.(\d+)\.mlp\.router\.weight")


class ReplayedRouters:
    """The routers of a pipeline stage, and the experts that their tokens go to."""

    def __init__(self, stage: torch.nn.Module, parameters: Iterable[str]) -> None:
        """Change the stage's routers. parameters: names of the parameters of all stages.

        Raises RecipeError if a fused kernel chooses the experts, and ValueError for a model without experts.
        """
        layers = sorted(int(match[1]) for match in map(_ROUTER.fullmatch, parameters) if match)
        if not layers:
            raise ValueError("policy.router_replay: got true for a model without experts")
        self._layers = len(layers)
        self._routers = {}
        for module in stage.modules():
            if isinstance(module, TopKRouter):
                if module.config.moe_router_fusion:
                    message = "got true with policy.router_replay.enabled=true; expected false, since the fused kernel chooses"
                    raise RecipeError(Problem(f"{OVERRIDES}.moe_router_fusion", "contradiction", message))
                router = module.router_replay = _Router()  # pyright: ignore[reportAttributeAccessIssue]
                self._routers[layers.index(module.layer_number - 1)] = router  # pyright: ignore[reportOptionalOperand]
        self._split = parallel_state.get_tensor_model_parallel_world_size() if stage.config.sequence_parallel else 1  # pyright: ignore

    @contextlib.contextmanager
    def forward(self, experts: torch.Tensor | None) -> Iterator[None]:
        """Replay these experts, [t, E, K], within this context and when a backward pass recomputes it; None: routers choose."""
        check_layers(experts, self._layers)
        if experts is not None and self._split > 1:
            experts = experts.chunk(self._split)[parallel_state.get_tensor_model_parallel_rank()]
        keep = torch.is_grad_enabled()
        for layer, router in self._routers.items():
            router.begin(None if experts is None else experts[:, layer].long(), keep)
        yield
        for router in self._routers.values():
            router.end()


class _Router:
    """Chooses the experts of one layer, as Megatron-Core's class `RouterReplay` does."""

    def __init__(self) -> None:
        self._now: torch.Tensor | None = None
        self._in_forward = self._keeps = False
        self._to_recompute: deque[torch.Tensor | None] = deque()  # of microbatches whose backward pass comes

    def begin(self, experts: torch.Tensor | None, keep: bool) -> None:
        """Choose `experts` [t, K] from now on. keep: whether a backward pass follows, which may need the choice again."""
        self._now, self._keeps, self._in_forward = experts, keep, True

    def end(self) -> None:
        """End the forward pass; calls from now on recompute."""
        self._now, self._in_forward = None, False

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores, experts), each [t, topk], of scores [t, experts]."""
        if not self._in_forward:
            experts = self._to_recompute.popleft()
        else:
            experts = self._now
            if self._keeps and not torch.is_grad_enabled():  # within a checkpoint, whose backward pass calls again
                self._to_recompute.append(experts)
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return (values, chosen) if experts is None else recorded(experts, scores, chosen)
