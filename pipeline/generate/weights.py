"""What a full set of weights is: the names and shapes of a Hugging Face checkpoint of the policy.

Both backends pass incoming weights through `checked`, so a wrong name, a wrong shape or a missing tensor is an error in either,
whatever the backend's own loader would have let pass. Placing the tensors is the backends' work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from pipeline.config import PolicyConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def model_config(policy: PolicyConfig) -> PreTrainedConfig:
    """The policy's Hugging Face config with `hf_config_overrides`."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(policy.model_name, **policy.hf_config_overrides)


def checkpoint_shapes(config: PreTrainedConfig) -> tuple[dict[str, torch.Size], set[str]]:
    """The shape of every tensor that a checkpoint must hold, and the names of tied copies that it may hold besides."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    # In memory transformers fuses some tensors (the experts of a layer); checkpoints keep them apart.
    return {name: tensor.shape for name, tensor in revert_weight_conversion(model, state).items()}, tied


def checked(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size], tied: set[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass `weights` on, without tied copies. Raises ValueError on a name or shape that is not in `shapes`, on a name that
    comes twice, and, at the end, if a name has not come."""
    missing = dict.fromkeys(shapes)
    for name, tensor in weights:
        if name in tied:
            continue
        if name not in shapes:
            raise ValueError(f"weights: the model has no tensor '{name}'")
        if name not in missing:
            raise ValueError(f"weights: '{name}' came twice")
        if tensor.shape != shapes[name]:
            raise ValueError(f"weights: '{name}' has shape {list(tensor.shape)}, the model wants {list(shapes[name])}")
        del missing[name]
        yield name, tensor
    if missing:
        raise ValueError(f"weights: {len(missing)} tensors did not come, the first is '{next(iter(missing))}'")
