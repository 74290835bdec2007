"""Record the experts that vLLM chooses for each token of a request (policy.router_replay).

On GPUs vLLM returns them itself (`enable_return_routed_experts`), with the expert numbers of all layers. Its runner for CPUs
does not, so there `CPURecorder` copies them from the routers after each batch. Tokens whose keys and values come from the
prefix cache pass no router, so a CPU engine that records has no prefix cache.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from typing_extensions import override
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Request

KEY = "policy.router_replay.enabled"
logger = logging.getLogger(__name__)


def routing_arguments() -> dict[str, Any]:
    """Return the engine's arguments with which it can record."""
    if current_platform.is_cpu():
        return {"enable_prefix_caching": False}
    return {"enable_return_routed_experts": True, "enable_prefix_caching": True}


def mixtures(model: torch.nn.Module) -> list[MoERunner]:
    """Return the mixtures of experts of a model, in the order of its layers. Raises RecipeError if it has none."""
    found = sorted((m for m in model.modules() if isinstance(m, MoERunner)), key=lambda m: m.layer_id)
    if not found:
        raise RecipeError(Problem(KEY, "unsupported", "got true for a model whose layers have no experts in vLLM. Try false"))
    return found


class RoutingRecorder:
    """Reads the experts from the outputs of vLLM."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [mixture.layer_id for mixture in mixtures(model)]
        self._watched: dict[str, tuple[str, Request]] = {}  # the engine's id and the request, by the request's id
        self._warned = False

    def watch(self, added: str, request: Request) -> None:
        """Record a request that the engine has added under the id `added`."""
        self._watched[request.id] = added, request

    def experts(self, id: str, output: Any) -> np.ndarray | None:
        """Return the experts of a request that ended, see Completion.experts; None, with one warning, if any token lacks them.

        output: vLLM's completion of the request.
        """
        added, request = self._watched.pop(id)
        experts = self._read(added, request.routed, output)
        expected = len(request.tokens) + len(output.token_ids) - 1 - request.routed
        if experts is not None and len(experts) >= expected:
            return experts[:expected]  # drafted tokens that were rejected at the end may have experts too
        if not self._warned and output.token_ids:
            logger.warning("%s: vLLM recorded no experts of request %s; its tokens use the trained router's choice", KEY, id)
            self._warned = True
        return None

    def _read(self, added: str, routed: int, output: Any) -> np.ndarray | None:
        return None if output.routed_experts is None else output.routed_experts[:, self._layers]


class CPURecorder(RoutingRecorder):
    """Copies the experts from the routers of a CPU engine after each batch.

    Tokens whose keys and values are computed again, after a refit or a preemption, get the experts of the last computation.
    """

    def __init__(self, model: torch.nn.Module, runner: Any) -> None:
        super().__init__(model)
        self._batch: list[torch.Tensor | None] = [None] * len(self._layers)  # [tokens, K] of each layer
        self._rows: dict[str, list[np.ndarray]] = {}  # [E, K] of each token so far, by the engine's id of a request
        for number, mixture in enumerate(mixtures(model)):
            assert isinstance(mixture.router, BaseRouter)  # as all on a CPU
            mixture.router.set_capture_fn(functools.partial(self._batch.__setitem__, number))
        execute = runner.execute_model

        @functools.wraps(execute)
        def recording(scheduled: Any, *more: Any, **options: Any) -> Any:
            result = execute(scheduled, *more, **options)
            if scheduled.total_num_scheduled_tokens:
                self._record(scheduled, runner.input_batch.req_ids)
            return result

        runner.execute_model = recording

    @override
    def watch(self, added: str, request: Request) -> None:
        super().watch(added, request)
        self._rows[added] = []

    @override
    def _read(self, added: str, routed: int, output: Any) -> np.ndarray | None:
        rows = self._rows.pop(added)[routed:]
        return np.stack(rows) if rows else None

    def _record(self, scheduled: Any, ids: list[str]) -> None:
        """Store the experts of a batch, whose requests lie one after another in the order of `ids`."""
        rows = torch.stack([layer for layer in self._batch if layer is not None], 1).to(torch.int16).numpy()
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        at = 0
        for id in ids:
            count = scheduled.num_scheduled_tokens.get(id, 0)
            if count and (kept := self._rows.get(id)) is not None:
                kept[computed[id] :] = rows[at : at + count]  # replaced if it was preempted, or a drafted token rejected
            at += count
