"""Router replay (policy.router_replay): a Hugging Face policy sends each token to the experts that the engine chose.

An engine and a trainer round differently, so their routers can choose other experts for the same token. Then log-probs differ
by far more than rounding, and importance weights with them (R3, https://arxiv.org/abs/2510.11370). With replay only the choice
comes from the engine: weights of the chosen experts, and their gradients, come from the trained router.

Each of transformers' routers chooses with `torch.topk(scores, k)` over all experts of a token. Within a layer's mixture, replay
changes the result of this call to the recorded experts and their scores. It does the same when the backward pass recomputes a
layer, since no other batch is computed in between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from typing_extensions import override

from pipeline.recipe.problems import Problem, RecipeError
from pipeline.train.expert_parallel import expert_modules
from pipeline.types import NO_EXPERT

KEY = "policy.router_replay.enabled"


class RouterReplay:
    """The mixtures of experts of a model, and the experts that their tokens go to."""

    def __init__(self, hf: PreTrainedModel) -> None:
        """Change the mixtures' forward. Raises RecipeError if transformers does not dispatch its experts by token."""
        modules = expert_modules(hf)
        if not modules:
            name = type(hf).__name__
            message = f"got true, but {name} has no experts that transformers dispatches by token; expected false"
            raise RecipeError(Problem(KEY, "unsupported", message))
        self._experts: torch.Tensor | None = None
        self._layers = len(modules)
        for layer, (name, experts) in enumerate(modules.items()):
            mixture = hf.get_submodule(name.rpartition(".")[0])
            mixture.forward = functools.partial(self._forward, mixture.forward, layer, int(experts.num_experts))  # pyright: ignore[reportArgumentType]

    def use(self, experts: torch.Tensor | None) -> None:
        """Replay these experts until the next call. experts: [t, E, K], see PackedBatch.experts; None: the routers choose."""
        check_layers(experts, self._layers)
        self._experts = experts

    def _forward(self, forward: Any, layer: int, count: int, *inputs: Any, **options: Any) -> Any:
        if self._experts is None:
            return forward(*inputs, **options)
        with _RecordedChoice(self._experts[:, layer].long(), count) as choice:
            output = forward(*inputs, **options)
        if not choice.was_asked:
            message = "got true, but a router of the model does not choose by torch.topk over all experts; expected false"
            raise RecipeError(Problem(KEY, "unsupported", message))
        return output


class _RecordedChoice(TorchFunctionMode):
    """Within this context, `torch.topk` over all experts of each token chooses `experts`, [t, K] int64."""

    def __init__(self, experts: torch.Tensor, count: int) -> None:
        super().__init__()
        self._experts, self._scores_shape = experts, (len(experts), count)
        self.was_asked = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        (scores, *_), (_, chosen) = args, result
        if scores.shape != self._scores_shape or chosen.shape != self._experts.shape:
            return result  # a choice among groups of experts
        self.was_asked = True
        return torch.return_types.topk(recorded(self._experts, scores, chosen))


def recorded(experts: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scores, experts), each [t, K]: the recorded experts or, where none are recorded, the router's choice.

    scores: [t, experts], of all experts. chosen: [t, K], the router's choice.
    """
    experts = torch.where(experts == NO_EXPERT, chosen, experts)
    return scores.gather(-1, experts), experts


def check_layers(experts: torch.Tensor | None, layers: int) -> None:
    """Raise ValueError if the experts that an engine recorded, [t, E, K], are of another number of layers."""
    if experts is not None and experts.size(1) != layers:
        raise ValueError(f"the engine recorded the experts of {experts.size(1)} layers; the policy has {layers} with experts")
