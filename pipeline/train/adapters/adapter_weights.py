"""The numbers of adapters: initial values, the merged weight, DoRA's norms. The same for every backend and layout.

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
"""A tensor's sum over the ranks that hold other columns of the same rows."""


def initial_a(spec: AdapterSpec, layer: str, columns: int, seed: int) -> torch.Tensor:
    """Draw the whole A [dim, columns] float32 of a layer, by its name on disk. B starts at 0.

    The draw depends on the seed and the name alone, so a rank that needs a part of A draws all of it and cuts. init: "xavier"
    as in NeMo's Automodel, "kaiming" as in peft and Automodel, "gaussian" as in peft.
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
    """Return DoRA's initial magnitudes [..., out] float32, the norms of the rows of these rows of W."""
    squares = weight.float().square().sum(-1)
    return (sum_columns(squares) if sum_columns else squares).sqrt()


def row_norms(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, sum_columns: Sum | None = None
) -> torch.Tensor:
    """Return ||W + scale B A|| of each row, [..., out] float32 or wider, without a graph.

    The paper and peft treat it as a constant in the backward pass. weight: some rows and columns of W, with the same columns of
    A and the same rows of B. sum_columns: where other ranks hold other columns.
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
    """Return W + scale B A, with DoRA's magnitudes if given, in the precision of W, rounded once.

    The arguments are parts as for `row_norms`; magnitude: [..., out] of these rows.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(wide) + scale * (b.to(wide) @ a.to(wide))
    if magnitude is not None:
        merged *= (magnitude.to(wide) / row_norms(weight, a, b, scale, sum_columns)).unsqueeze(-1)
    return merged.to(weight.dtype)
