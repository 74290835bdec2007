"""LoRA adapters by peft (https://arxiv.org/abs/2106.09685): W + alpha / dim B A, where A and B are trained and W is frozen.

Weights leave the backend merged, under the names of W, so refit and export need no code for adapters. A checkpoint holds A and
B, as `adapter.<layer>.lora_A` and `.lora_B`. W is loaded from policy.model_name again. W alone is the reference policy.

Not supported: tensor parallelism, adapters of embeddings, heads and experts that are bare parameters, dropout, trained biases.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.boxes import Piece, whole
from pipeline.config import LoRAConfig, Problem, RecipeError
from pipeline.models.hugging_face import SCORE
from pipeline.train.shards import BoxReader, gather_full, local, local_box

KEY = "policy.dtensor_cfg.lora_cfg"
_NAME = "default"  # peft's name of the adapters


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer."""

    stored: str  # the layer's name on disk
    layer: nn.Module  # peft's module, which contains the linear layer
    weight: str  # names of parameters in memory: W [out, in]
    a: str  # A [dim, in]
    b: str  # B [out, dim]
    scale: float

    def pieces(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Piece]:
        """Return {name in memory: the piece of the checkpoint} of A and B."""
        boxes = {name: whole(tuple(parameters[name].shape)) for name in (self.a, self.b)}
        return {n: Piece(f"{self.stored}.lora_{'A' if n == self.a else 'B'}", box, box) for n, box in boxes.items()}


def inject(hf: PreTrainedModel, config: LoRAConfig, layout: dict[str, list[Piece]]) -> list[Adapter]:
    """Add adapters in float32 to a model on the meta device. Only they, and a value head, are trained then.

    layout: of the model; its keys are changed to the new names of the parameters. Raises RecipeError for layers that cannot
    have an adapter.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if config.dim < 1:
        raise _problem("dim", "too-small", f"got {config.dim}; expected at least 1")
    targets = _targets(hf, config)
    for target in targets:
        pieces, shape = layout[f"{target}.weight"], tuple(hf.get_parameter(f"{target}.weight").shape)
        if [piece.source for piece in pieces] != [whole(shape)]:
            message = f"{target} of {type(hf).__name__} is more than one tensor on disk, so it cannot have an adapter"
            raise _problem("target_modules", "unsupported", message)
    options = LoraConfig(r=config.dim, lora_alpha=config.alpha, target_modules=targets)
    inject_adapter_in_model(options, hf, _NAME, low_cpu_mem_usage=True)
    adapters = []
    for target in targets:
        layer = hf.get_submodule(target)
        layer.lora_A.float()
        layer.lora_B.float()
        for parameter in ("weight", "bias"):
            if f"{target}.{parameter}" in layout:
                layout[f"{target}.base_layer.{parameter}"] = layout.pop(f"{target}.{parameter}")
        weight = f"{target}.base_layer.weight"
        stored = layout[weight][0].name.removesuffix(".weight")
        a, b = (f"{target}.lora_{matrix}.{_NAME}.weight" for matrix in "AB")
        adapters.append(Adapter(stored, layer, weight, a, b, config.alpha / config.dim))
    if SCORE in layout:
        hf.get_submodule("score").float().requires_grad_(True)
    return adapters


def _problem(name: str, code: str, message: str) -> RecipeError:
    return RecipeError(Problem(f"{KEY}.{name}", code, message))


def _targets(hf: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Return the names of the layers that get adapters."""
    modules = {name: module for name, module in hf.named_modules() if name}
    heads = {name for name, module in modules.items() if module in (hf.get_output_embeddings(), getattr(hf, "score", None))}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in heads]
    for key, allowed in (("target_modules", set(linear)), ("exclude_modules", heads.union(linear))):
        for wanted in getattr(config, key):
            found = [name for name in modules if _matches(name, wanted)]
            if not found or not set(found) <= allowed:
                available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                what = ", ".join(found[:2]) or "no layer"
                message = f"got '{wanted}', which is {what} of {type(hf).__name__}; expected names of {available}"
                raise _problem(key, "not-a-choice", message)
    if config.match_all_linear == bool(config.target_modules):
        count = len(config.target_modules)
        choice = str(config.match_all_linear).lower()
        message = f"got {count} names with match_all_linear={choice}; expected either match_all_linear=true or names"
        raise _problem("target_modules", "contradiction", message)
    if config.match_all_linear and any(parameter.dim() > 2 for parameter in hf.parameters()):
        message = (
            f"got true for {type(hf).__name__}, whose experts are bare parameters and cannot have adapters. Try false, with"
            " layers in target_modules"
        )
        raise _problem("match_all_linear", "unsupported", message)
    targets = linear if config.match_all_linear else [n for n in linear if any(_matches(n, t) for t in config.target_modules)]
    targets = [name for name in targets if not any(_matches(name, excluded) for excluded in config.exclude_modules)]
    if not targets:
        message = f"got {config.exclude_modules}, which excludes all layers; expected at least one left"
        raise _problem("exclude_modules", "contradiction", message)
    return targets


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def initialize(adapters: Iterable[Adapter], parameters: Mapping[str, nn.Parameter], init: str, seed: int) -> None:
    """Initialize every A at random, equally for every layout, and every B with 0.

    init: "xavier" as in NeMo's Automodel, "kaiming" as in peft and Automodel, "gaussian" as in peft.
    """
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters:
        a, b = parameters[adapter.a], parameters[adapter.b]
        drawn = torch.empty(a.shape)
        if init == "xavier":
            nn.init.xavier_normal_(drawn, generator=generator)
        elif init == "kaiming":
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        elif init == "gaussian":
            nn.init.normal_(drawn, std=1 / len(drawn), generator=generator)
        else:
            raise _problem("lora_A_init", "not-a-choice", f"got {init}; expected xavier, gaussian or kaiming")
        local(a).copy_(drawn[local_box(a).within(whole(drawn.shape))])
        local(b).zero_()


@contextlib.contextmanager
def disabled(adapters: Iterable[Adapter]) -> Iterator[None]:
    """Disable the adapters within this context."""
    # peft's own switch also turns off requires_grad, which fully_shard may read only once.
    for adapter in adapters:
        adapter.layer.forward = adapter.layer.get_submodule("base_layer").forward
    try:
        yield
    finally:
        for adapter in adapters:
            del adapter.layer.forward


class MergedWeights:
    """This rank's part of each adapted weight, merged with its adapter in separate memory."""

    def __init__(self, adapters: Iterable[Adapter], parameters: Mapping[str, nn.Parameter], device: torch.device):
        self._adapters = adapters
        self._parameters = parameters
        self._device = device
        self.tensors = {adapter.weight: torch.empty_like(local(parameters[adapter.weight])) for adapter in adapters}
        self.refresh()

    def refresh(self) -> None:
        """Merge the current adapters. Collective."""
        for adapter in self._adapters:
            weight, a, b = (self._parameters[name] for name in (adapter.weight, adapter.a, adapter.b))
            # `fully_shard` cuts B and W into the same rows. A is needed whole.
            whole_a, rows = gather_full(a, local(a).to(self._device)), local(b).to(self._device)
            self.tensors[adapter.weight].copy_(merge(local(weight).to(self._device), whole_a, rows, adapter.scale))


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale B A in the precision of W, rounded once."""
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def record(config: LoRAConfig, random_seed: int | None) -> dict[str, Any]:
    """Return what a checkpoint records besides A and B. random_seed: of W, if its weights are random."""
    return {"dim": config.dim, "alpha": config.alpha, "random_seed": random_seed}


def check_record(folder: Path, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> None:
    """Raise RecipeError if the checkpoint in `folder` has other adapters. theirs: its record; ours: the recipe's."""
    if theirs != ours:
        old, new = dict(theirs or {}), dict(ours or {})
        changes = ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in old | new if old.get(k) != new.get(k))
        message = f"{folder} was saved with other adapters, or for weights of another random seed: {changes}"
        raise RecipeError(Problem(KEY, "contradiction", message))


def adapted_weights(reader: BoxReader) -> dict[str, tuple[int, ...]]:
    """Return {weight on disk: shape} of the weights for which a checkpoint has adapters."""
    prefix, suffix = "adapter.", ".lora_A"
    found = {}
    for name, (_, columns) in ((n, shape) for n, shape in reader.shapes.items() if n.startswith(prefix) and n.endswith(suffix)):
        rows, _ = reader.shapes[f"{name.removesuffix(suffix)}.lora_B"]
        found[f"{name.removeprefix(prefix).removesuffix(suffix)}.weight"] = (rows, columns)
    return found


def merged_weight(name: str, weight: torch.Tensor, reader: BoxReader, record: Mapping[str, Any]) -> torch.Tensor:
    """Merge a whole weight with its adapter from a checkpoint. record: the checkpoint's."""
    names = [f"adapter.{name.removesuffix('.weight')}.lora_{matrix}" for matrix in "AB"]
    a, b = (reader.read(stored, whole(reader.shapes[stored])) for stored in names)
    return merge(weight, a, b, record["alpha"] / record["dim"])
