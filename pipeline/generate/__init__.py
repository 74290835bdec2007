"""Generation backends. `build` imports the one that the recipe names, and only that."""

from __future__ import annotations

import os

from pipeline.config import PolicyConfig
from pipeline.generate.base import GenerateBackend


def build(policy: PolicyConfig, engine_ranks: int, rank_in_engine: int, seed: int) -> GenerateBackend:
    """This rank's part of one engine. It has no weights yet: an `update` comes before the first request.

    Collective over the `engine_ranks` ranks of the engine. If torch.distributed is initialised, its default group must be
    exactly those ranks. `seed` only matters to requests without one of their own, of which there are none here.
    """
    if policy.generation.backend == "vllm":
        os.environ.update(policy.generation.vllm_cfg.env_vars)  # first: vLLM reads some when it is imported
        from pipeline.generate.vllm import VLLMBackend

        return VLLMBackend(policy, engine_ranks, rank_in_engine, seed)
    from pipeline.generate.transformers import TransformersBackend

    if engine_ranks != 1:
        raise ValueError(
            f"the transformers backend keeps a whole model on each rank; an engine of {engine_ranks} ranks needs vllm"
        )
    return TransformersBackend(policy)
