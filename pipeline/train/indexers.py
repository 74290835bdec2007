"""Replace the indexers of transformers' models, which choose the keys that a token sees, where they choose all of them.

`pipeline.models.backend_support.check_indexer` refuses longer sequences. An indexer has no gradient in transformers. Its
weights stay, frozen, because engines need them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def replace_indexers(hf: PreTrainedModel) -> None:
    """Freeze the indexers of a model, and make them return no choice, which packed attention expects, in place."""
    for name, module in hf.named_modules():
        if is_indexer(name):
            module.requires_grad_(False)
            module.forward = _all_keys


def is_indexer(name: str) -> bool:
    """Return whether a module of this name is an indexer."""
    return name.endswith(".self_attn.indexer")


def _all_keys(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states.new_empty(0, dtype=torch.int32)
