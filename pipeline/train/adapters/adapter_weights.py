"""Compute the initial values, the merged weights and DoRA's norms of adapters, equally for every backend and layout.

Weights and adapters may have leading dimensions, such as experts: W [..., out, in], A [..., dim, in], B [..., out, dim].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import nn

from pipeline.config import Problem, RecipeError
from pipeline.train.adapters.spec import AdapterSpec

KEY = "policy.dtensor_cfg.lora_cfg"
Sum = Callable[[torch.Tensor], torch.Tensor]
"""A function from a tensor to its sum over the ranks that hold other columns of the same rows."""


def initial_a(spec: AdapterSpec, layer: str, columns: int, seed: int) -> torch.Tensor:
    """Draw the whole initial A [dim, columns] of a layer, in float32. B starts at 0.

    layer: its name on disk. The draw depends only on the seed and this name, so a rank that needs a part of A draws all of A
    and cuts it. spec.init: "xavier" as in NeMo's Automodel, "kaiming" as in peft and Automodel, "gaussian" as in peft.
    """
    digest = hashlib.sha256(f"{seed}:{layer}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    drawn = torch.empty(spec.dim, columns)
    if spec.init == "xavier":
        return nn.init.xavier_normal_(drawn, generator=generator)
    if spec.init == "kaiming":
        return nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    if spec.init == "gaussian":
        return nn.init.normal_(drawn, std=1 / spec.dim, generator=generator)
    message = f"got {spec.init}; expected xavier, gaussian or kaiming"
    raise RecipeError(Problem(f"{KEY}.lora_A_init", "not-a-choice", message))


def initial_magnitude(weight: torch.Tensor, sum_columns: Sum | None = None) -> torch.Tensor:
    """Return DoRA's initial magnitudes [..., out] float32: the norm of each row of W. Arguments: see `row_norms`."""
    squares = weight.float().square().sum(-1)
    return (sum_columns(squares) if sum_columns else squares).sqrt()


def row_norms(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, sum_columns: Sum | None = None
) -> torch.Tensor:
    """Return the norm of each row of W + scale B A, [..., out] in float32 or wider, without a graph.

    The paper and peft treat the norms as constants in the backward pass. weight: some rows and columns of W. a: the same
    columns of A. b: the same rows of B. sum_columns: required if other ranks hold other columns of these rows.
    """
    with torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)
        squares = (weight.to(wide) + scale * (b.to(wide) @ a.to(wide))).square().sum(-1)
        return (sum_columns(squares) if sum_columns else squares).sqrt()


def merge(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor | None = None,
    sum_columns: Sum | None = None,
) -> torch.Tensor:
    """Return the merged weight W + scale B A, in the dtype of W. It is computed in float32 or wider, and rounded once.

    magnitude [..., out]: with DoRA, the norms that the rows of the merged weight get. Other arguments: see `row_norms`.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(wide) + scale * (b.to(wide) @ a.to(wide))
    if magnitude is not None:
        merged *= (magnitude.to(wide) / row_norms(weight, a, b, scale, sum_columns)).unsqueeze(-1)
    return merged.to(weight.dtype)
