"""Compute, from the recipe, the tensors and boxes of Megatron-Core's adapters in a refit that transfers only adapters.

`refit_adapters` is the counterpart for FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.boxes import Box
from pipeline.config import MegatronLoRAConfig, refuse
from pipeline.models.family import Parameter
from pipeline.models.tensors import Tensor
from pipeline.train.adapters.module_layers import AdaptedModule, not_served_modules, options
from pipeline.train.adapters.modules import choose
from pipeline.train.adapters.spec import A, AdapterSpec, B


class ModuleAdapters:
    """The adapters of a model on Megatron-Core: their tensors, and the boxes of them that a rank holds."""

    def __init__(self, config: MegatronLoRAConfig, parameters: Mapping[str, Parameter], tensors: Iterable[Tensor]) -> None:
        """parameters: name -> parameter of the model in Megatron-Core. tensors: the model's tensors on disk.

        Raises RecipeError for names in `config` that match no module, and for adapters that engines cannot apply.
        """
        chosen = choose(config, parameters)
        refuse(not_served_modules(chosen))
        self._spec, self._tensors = AdapterSpec.of(options(config)), {tensor.name: tensor for tensor in tensors}
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._modules = {f"{module.name}.weight": AdaptedModule.of(module, shapes) for module in chosen}
        self._shapes = shapes

    def adapts(self, name: str) -> bool:
        """Return whether the parameter of this name in Megatron-Core is a weight with adapters."""
        return name in self._modules

    def tensors(self) -> list[Tensor]:
        """Return A and B of each adapted layer, in the same order as in a run."""
        tensors = []
        for module in self._modules.values():
            of = self._tensors[module.weight.sources[0]]
            shapes = module.tensors(self._spec, self._shapes)
            tensors += [Tensor(name, shape, of.part, layer=of.layer) for name, shape in shapes.items()]
        return tensors

    def boxes(self, name: str, parts: Iterable[tuple[str, Box]]) -> Iterator[tuple[str, Box]]:
        """Yield (name of A or B, box) for the boxes of a weight's adapters that a rank holds.

        name: the name of the weight in Megatron-Core. parts: the rank's boxes of this weight. B is cut like the weight's rows,
        A like its columns. If the weight fuses several layers, the rank has A of all of them.
        """
        parts, dim = list(parts), self._spec.dim
        layers, (_, first) = self._modules[name].names, parts[0]
        for layer in layers:
            yield layer + A, Box((0, first.offset[1]), (dim, first.size[1]))
        for source, box in parts:
            if (layer := source.removesuffix(".weight")) in layers:
                yield layer + B, Box((box.offset[0], 0), (box.size[0], dim))
