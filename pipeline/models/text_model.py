"""Describe the language model of a checkpoint to Megatron-Core, with the checkpoint's names.

A family describes its models under the names of a checkpoint of text alone. In a multimodal checkpoint the same tensors have
other prefixes (`model.language_model.`, `language_model.model.`), which transformers' own model gives. The parts for pictures
and sound neither train nor compute; ranks hold them for refits, exports and checkpoints.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline import models
from pipeline.models.decoder import unchanged
from pipeline.models.family import SCORE, Parameter, unsupported_model
from pipeline.models.hugging_face import checkpoint_shapes, language_model, meta_model, on_disk
from pipeline.models.recorded_layout import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head

BODY, OUTPUT = "model.", "lm_head.weight"
"""In a checkpoint of text alone: the prefix of the body's tensors, and the output layer."""
OTHERS = "other_modalities"
"""The prefix of the Megatron names of tensors for pictures and sound, which have numbers."""


@dataclass(frozen=True)
class TextModel:
    """The language model of a checkpoint."""

    whole: PreTrainedConfig  # of the checkpoint
    head: Head = "logprobs"

    @functools.cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration of the language model, with an output layer that is tied as in the checkpoint."""
        text = self.whole.get_text_config()
        if text is not self.whole:
            text = copy.deepcopy(text)
            text.tie_word_embeddings = self.whole.tie_word_embeddings
        return text

    @functools.cached_property
    def shapes(self) -> dict[str, Shape]:
        """{name: shape} of all tensors on disk, in a checkpoint's order."""
        return checkpoint_shapes(self.whole, self.head)[0]

    @functools.cached_property
    def parameters(self) -> dict[str, Parameter]:
        """{Megatron name: parameter} of the language model. Raises RecipeError for a family without a description."""
        described = models.family(self.config.model_type).parameters(self.config, self.head)
        if self.config is self.whole:
            return described
        body, head = self._names

        def renamed(source: str) -> str:
            return head if source in (OUTPUT, SCORE) else body + source.removeprefix(BODY)

        return {name: replace(of, sources=tuple(map(renamed, of.sources))) for name, of in described.items()}

    @functools.cached_property
    def others(self) -> dict[str, Parameter]:
        """{Megatron name: parameter} of the tensors for pictures and sound.

        Raises RecipeError unless the family describes all other tensors of the checkpoint.
        """
        sources = {source for parameter in self.parameters.values() for source in parameter.sources}
        others = [name for name in self.shapes if name not in sources]
        inside = others if self.config is self.whole else [name for name in others if name.startswith(self._names)]
        if wrong := [*inside, *(sources - self.shapes.keys())]:
            message = f"{self.whole.model_type} has {wrong[0]} either in its checkpoint or in Megatron-Core's description alone"
            raise unsupported_model(f"{message} ({self.config.model_type}). Try policy.megatron_cfg.enabled=false")
        numbered = (unchanged(f"{OTHERS}.{i}", name) for i, name in enumerate(others))
        return {name: parameter for of in numbered for name, parameter in of.items()}

    @functools.cached_property
    def _names(self) -> tuple[str, str]:
        """The prefix of the body's tensors in a multimodal checkpoint, and the name of the head's weight."""
        model = meta_model(self.whole, self.head)
        body = language_model(model)
        path = next(name for name, module in model.named_modules() if module is body)
        leaf, tensor = next(iter(body.named_parameters()))
        head = SCORE if self.head == "values" else OUTPUT
        (first,), (last,) = (on_disk(model, {name: tensor}) for name in (f"{path}.{leaf}", head))
        return first.removesuffix(leaf), last
