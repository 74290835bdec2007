"""Check that incoming weights have exactly the names and shapes of a Hugging Face checkpoint of the policy.

Both backends pass new weights through `checked_weights`. So a wrong name, a wrong shape or a missing tensor is an error in both
backends, even if the backend's own loader would accept it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch


def checked_weights(
    weights: Iterable[tuple[str, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` without tied copies.

    shapes: tensor -> its shape. Raises ValueError for a name or shape that is not in `shapes`, for a repeated name, and, at the
    end, if a name is missing.
    """
    missing = dict.fromkeys(shapes)
    for name, tensor in weights:
        if name in tied:
            continue
        if name not in shapes:
            raise ValueError(f"weights: the model has no tensor '{name}'")
        if name not in missing:
            raise ValueError(f"weights: '{name}' is given twice")
        if tensor.shape != shapes[name]:
            raise ValueError(f"weights: '{name}' has shape {list(tensor.shape)}; expected {list(shapes[name])}")
        del missing[name]
        yield name, tensor
    if missing:
        raise ValueError(f"weights: {len(missing)} tensors are missing; the first is '{next(iter(missing))}'")
