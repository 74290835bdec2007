"""Incoming weights are a full set: the names and shapes of a Hugging Face checkpoint of the policy.

Both backends pass them through `checked_weights`, so a wrong name, a wrong shape or a missing tensor is an error in either,
whatever the backend's own loader would have let pass. Placing the tensors is the backends' work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]
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
