"""Low-rank adapters by peft (https://arxiv.org/abs/2106.09685): W + alpha / dim B A, of which A and B are trained and W is not.

What leaves the backend is merged, under the names of W, so that refit and export know of no adapters. A checkpoint holds A and
B, as `adapter.<layer>.lora_A` and `.lora_B`; W comes from policy.model_name again, and W alone is the reference policy.

Left out: tensor parallelism, adapters of embeddings, heads and experts that are bare parameters, dropout, trained biases.
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
from pipeline.config import LoRAConfig
from pipeline.models.hugging_face import SCORE
from pipeline.train.shards import BoxReader, gather_full, local, local_box

KEY = "policy.dtensor_cfg.lora_cfg"
_NAME = "default"  # peft's name of the adapters


@dataclass(frozen=True)
class Adapter:
    """Of one linear layer, which it is a part of from now on."""

    stored: str  # the layer's name on disk
    layer: nn.Module  # peft's
    weight: str  # names of parameters in memory: W [out, in]
    a: str  # A [dim, in]
    b: str  # B [out, dim]
    scale: float

    def pieces(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Piece]:
        """A and B, by their names in memory, as what they are in a checkpoint."""
        boxes = {name: whole(tuple(parameters[name].shape)) for name in (self.a, self.b)}
        return {n: Piece(f"{self.stored}.lora_{'A' if n == self.a else 'B'}", box, box) for n, box in boxes.items()}


def inject(hf: PreTrainedModel, config: LoRAConfig, layout: dict[str, list[Piece]]) -> list[Adapter]:
    """Give a model on the meta device adapters in float32; it then trains those alone, and a value head.

    layout: of the model; its keys are changed to the names that parameters have from now on. Raises ValueError, naming the key
    of the recipe, for what cannot be adapted so.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if config.dim < 1:
        raise ValueError(f"{KEY}.dim: {config.dim} is not a rank; it must be at least 1")
    targets = _targets(hf, config)
    for target in targets:
        pieces, shape = layout[f"{target}.weight"], tuple(hf.get_parameter(f"{target}.weight").shape)
        if [piece.source for piece in pieces] != [whole(shape)]:
            raise ValueError(f"{KEY}: {target} of {type(hf).__name__} is more than one tensor on disk, so it gets no adapter")
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
        hf.score.float().requires_grad_(True)
    return adapters


def _targets(hf: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """The names of the layers that get adapters."""
    modules = {name: module for name, module in hf.named_modules() if name}
    heads = {name for name, module in modules.items() if module in (hf.get_output_embeddings(), getattr(hf, "score", None))}
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in heads]
    for key, allowed in (("target_modules", set(linear)), ("exclude_modules", heads.union(linear))):
        for wanted in getattr(config, key):
            found = [name for name in modules if _matches(name, wanted)]
            if not found or not set(found) <= allowed:
                raise ValueError(
                    f"{KEY}.{key}: '{wanted}' of {type(hf).__name__} is {', '.join(found[:2]) or 'nothing'}; linear layers but"
                    f" the head are {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
                )
    if config.match_all_linear == bool(config.target_modules):
        raise ValueError(f"{KEY}: either match_all_linear is true or target_modules names layers, not both and not neither")
    if config.match_all_linear and any(parameter.dim() > 2 for parameter in hf.parameters()):
        raise ValueError(
            f"{KEY}.match_all_linear: {type(hf).__name__} keeps its experts as bare parameters, which get no adapters; set it"
            " to false and name other layers in target_modules"
        )
    targets = linear if config.match_all_linear else [n for n in linear if any(_matches(n, t) for t in config.target_modules)]
    targets = [name for name in targets if not any(_matches(name, excluded) for excluded in config.exclude_modules)]
    if not targets:
        raise ValueError(f"{KEY}.exclude_modules: {config.exclude_modules} leaves no layer to adapt")
    return targets


def _matches(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def initialize(adapters: Iterable[Adapter], parameters: Mapping[str, nn.Parameter], init: str, seed: int) -> None:
    """Draw every A, the same on every layout, and let B be 0.

    init: "xavier" and "kaiming" as NeMo's Automodel and peft have them, "gaussian" as peft has it.
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
            raise ValueError(f"{KEY}.lora_A_init: '{init}' is not one of: xavier, gaussian, kaiming")
        local(a).copy_(drawn[local_box(a).within(whole(drawn.shape))])
        local(b).zero_()


@contextlib.contextmanager
def disabled(adapters: Iterable[Adapter]) -> Iterator[None]:
    """The model as if it had no adapters."""
    # peft's own switch also turns off requires_grad, which fully_shard may look at only once.
    for adapter in adapters:
        adapter.layer.forward = adapter.layer.base_layer.forward
    try:
        yield
    finally:
        for adapter in adapters:
            del adapter.layer.forward


class MergedWeights:
    """This rank's part of each adapted weight with its adapter, in memory of its own."""

    def __init__(self, adapters: Iterable[Adapter], parameters: Mapping[str, nn.Parameter], device: torch.device):
        self._adapters = adapters
        self._parameters = parameters
        self._device = device
        self.tensors = {adapter.weight: torch.empty_like(local(parameters[adapter.weight])) for adapter in adapters}
        self.refresh()

    def refresh(self) -> None:
        """Collective."""
        for adapter in self._adapters:
            weight, a, b = (self._parameters[name] for name in (adapter.weight, adapter.a, adapter.b))
            # `fully_shard` cuts B as it cuts W, into the same rows; A is needed whole.
            whole_a, rows = gather_full(a, local(a).to(self._device)), local(b).to(self._device)
            self.tensors[adapter.weight].copy_(merge(local(weight).to(self._device), whole_a, rows, adapter.scale))


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale B A in the precision of W, rounded once."""
    return torch.addmm(weight.float(), b, a, alpha=scale).to(weight.dtype)


# ---- checkpoints --------------------------------------------------------------------------------------------------------


def record(config: LoRAConfig, random_seed: int | None) -> dict[str, Any]:
    """What a checkpoint must say besides A and B. random_seed: of W, if that was drawn and not read."""
    return {"dim": config.dim, "alpha": config.alpha, "random_seed": random_seed}


def check_record(folder: Path, theirs: Mapping[str, Any] | None, ours: Mapping[str, Any] | None) -> None:
    """Raises ValueError if the checkpoint in `folder` is of other adapters."""
    if theirs != ours:
        both = ((theirs or {}), (ours or {}))
        odd = [f"{key} {both[0].get(key)} -> {both[1].get(key)}" for key in both[0] | both[1]]
        raise ValueError(f"{folder}: {KEY}, or the seed of the weights that it adapts, has changed since: {', '.join(odd)}")


def adapted_weights(reader: BoxReader) -> dict[str, tuple[int, ...]]:
    """The weights on disk that a checkpoint has adapters for, and the shapes that they must have."""
    prefix, suffix = "adapter.", ".lora_A"
    found = {}
    for name, (_, columns) in ((n, shape) for n, shape in reader.shapes.items() if n.startswith(prefix) and n.endswith(suffix)):
        rows, _ = reader.shapes[f"{name.removesuffix(suffix)}.lora_B"]
        found[f"{name.removeprefix(prefix).removesuffix(suffix)}.weight"] = (rows, columns)
    return found


def merged_weight(name: str, weight: torch.Tensor, reader: BoxReader, record: Mapping[str, Any]) -> torch.Tensor:
    """A whole weight with its adapter from a checkpoint, which has this `record`."""
    names = [f"adapter.{name.removesuffix('.weight')}.lora_{matrix}" for matrix in "AB"]
    a, b = (reader.read(stored, whole(reader.shapes[stored])) for stored in names)
    return merge(weight, a, b, record["alpha"] / record["dim"])
