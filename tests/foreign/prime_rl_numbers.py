"""`python -m tests.foreign.prime_rl_numbers CLONE`: our loss for a recipe of prime-rl beside prime-rl's own, in float64.

The function runs from src/prime_rl/trainer/rl/loss.py of a clone, with empty modules for what it does not use. It needs what
`golden_prime_rl.py` needs.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import torch

from launch.recipes import reading
from pipeline.algorithms.loss import policy_loss
from tests.algorithms.sampled import gradient_of, outputs_of, random_sampled
from tests.foreign import golden_prime_rl

SEEDS = 20
BOUNDS = {"dppo_mask_low": 0.02, "dppo_mask_high": 0.01, "kl_tau": 0.1}  # within which some tokens of the batches are not


class _AnyType:
    def __class_getitem__(cls, item: object) -> type:
        return cls


def loss_module(root: Path) -> Any:
    """Return prime-rl's module of losses, without its checks of types and compilation."""
    golden_prime_rl.classes()
    names = dict.fromkeys(("Bool", "Float", "Int"), _AnyType)
    typed = {"jaxtyped": lambda **_: lambda function: function, **names}
    for name, contents in (
        ("beartype", {"beartype": lambda function: function}),
        ("jaxtyping", typed),
        ("prime_rl.utils.utils", {"import_object": None}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)
    spec = importlib.util.spec_from_file_location("prime_rl_loss_of_clone", root / "src/prime_rl/trainer/rl/loss.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(root: Path) -> None:
    module = loss_module(root)
    from prime_rl.configs.trainer import DefaultLossConfig  # pyright: ignore[reportMissingImports] of a clone

    options = [word for key, bound in BOUNDS.items() for word in (f"--trainer.loss.{key}", str(bound))]
    config = reading.load(str(root / "configs/basic/reverse-text/rl.toml"), options).loss_fn
    worst, masked, largest = 0.0, 0.0, 0.0
    for seed in range(SEEDS):
        packed = random_sampled(seed, noise=0.4)
        batch, leaf = packed.batch, packed.leaf.detach().clone().requires_grad_()
        ours = policy_loss(config, outputs_of(packed), batch, packed.counts)
        counted = [torch.where(batch.loss_mask, v, 0.0) for v in (leaf, batch.generate_logprobs, batch.advantages)]
        now, generate, advantages, mask = (list(v.split(list(batch.lengths))) for v in (*counted, batch.loss_mask))
        function = module.setup_rl_loss_fn(DefaultLossConfig(**BOUNDS))
        count = int(batch.loss_mask.sum())
        loss, metrics = module.compute_loss(now, generate, None, advantages, mask, None, None, None, function, count, 1, 1)
        loss.backward()
        assert leaf.grad is not None
        found = [abs(ours.loss.item() - loss.item()), float((gradient_of(ours.loss, packed) - leaf.grad).abs().max())]
        assert all(map(math.isfinite, found))
        worst = max(worst, *found)
        largest = max(largest, float(leaf.grad.abs().max()))
        masked += float(torch.as_tensor(metrics["is_masked"]).mean()) / SEEDS
    assert largest > 0
    print(f"{SEEDS} batches, of whose tokens {masked:.0%} are masked; largest gradient {largest:.2g}")
    print(f"largest difference of losses and gradients: {worst:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
