"""Generation backends: engines that sample completions from the policy.

`generate_backend.py` defines the Protocols. `transformers.py` is the reference; `vllm.py` and the other `vllm_*.py` files are
the fast backend. `build` imports only the backend that the recipe names.
"""

from __future__ import annotations

from pipeline.config import PolicyConfig
from pipeline.generate.generate_backend import GenerateBackend
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import ServedAdapters


def build(
    policy: PolicyConfig, engine_ranks: int, rank_in_engine: int, seed: int, adapters: ServedAdapters | None = None
) -> GenerateBackend:
    """Return this rank's part of one engine, without weights: commit an `update` before the first request.

    Collective over the `engine_ranks` ranks of the engine. If torch.distributed is initialised, its default group must be
    exactly those ranks. `seed` is used only for requests without a seed, and the pipeline gives every request a seed.
    adapters: if given, updates deliver only these adapters, and the engine keeps the base weights of policy.model_name.
    """
    if policy.generation.backend == "vllm":
        from pipeline.generate.vllm import VLLMBackend  # slow

        return VLLMBackend(policy, engine_ranks, rank_in_engine, seed, adapters)
    if adapters:
        message = "got adapter with policy.generation.backend=transformers; expected merged. Try policy.generation.backend=vllm"
        raise RecipeError(Problem("policy.generation.lora_refit", "unsupported", message))
    from pipeline.generate.transformers import TransformersBackend  # only the reference needs it

    if engine_ranks != 1:
        message = (
            f"got transformers, which keeps a whole model on each rank, for engines of {engine_ranks} ranks; expected vllm"
        )
        raise RecipeError(Problem("policy.generation.backend", "unsupported", message))
    return TransformersBackend(policy)
