"""Models that an evaluation serves beside the evaluated one: a judge, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.recipe.values import CHAT_TEMPLATE, HF_OVERRIDES, Int, Line, Positive, Text, interpolation


@dataclass
class ServedTokenizerConfig:
    """The tokenizer and its chat template."""

    name: Line | None = None
    """Tokenizer. null: the one in the model's folder."""
    chat_template: Annotated[Text | None, Field(description=CHAT_TEMPLATE)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""


@dataclass
class ServedModelConfig:
    """A model on engines of its own, with the parallel layout of the policy's engines."""

    model_name: Line | None = None
    """A folder, or a Hugging Face name whose files are in the local cache."""
    tokenizer: ServedTokenizerConfig = field(default_factory=ServedTokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    precision: Literal["float32", "bfloat16", "float16"] = interpolation("${policy.precision}")
    """Precision of weights and activations."""
    engines: Positive = 1
    """Number of the generate component's engines that serve this model."""
    max_total_sequence_length: Annotated[Int, Field(ge=2)] = interpolation("${policy.max_total_sequence_length}")
    """Maximum tokens of a prompt and its answer."""


@dataclass
class JudgeConfig(ServedModelConfig):
    """The judge of tasks of kind comparison, multi_turn_rating and refusal: a model of the job, or an endpoint."""

    env_name: Text | None = None
    """In place of model_name: key under `env` of an llm_judge environment. Its endpoint is the judge."""
    max_new_tokens: Positive = 1024
    """With model_name: maximum tokens of a reply."""


@dataclass
class RewardModelConfig(ServedModelConfig):
    """The reward model of tasks of kind preference: a sequence classifier with one label.

    null: such tasks are skipped. policy.model_name: the evaluated model is a reward model; all engines serve it, and only
    tasks of kind preference are asked. Another model: engines of its own.
    """
