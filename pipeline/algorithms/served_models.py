"""Models that an evaluation serves beside the evaluated one: a judge, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.recipe.values import CHAT_TEMPLATE, HF_OVERRIDES, Float, Int, Line, Positive, Text, interpolation


@dataclass
class ServedTokenizerConfig:
    """The tokenizer and its chat template."""

    name: Annotated[Line | None, Field(description="Tokenizer. null: the one in the model's folder.")] = None
    chat_template: Annotated[Text | None, Field(description=CHAT_TEMPLATE)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Variables of the chat template.")] = None


@dataclass
class ServedModelConfig:
    """A model on engines of its own, with the parallel layout of the policy's engines."""

    model_name: Annotated[
        Line | None, Field(description="A folder, or a Hugging Face name whose files are in the local cache.")
    ] = None
    tokenizer: ServedTokenizerConfig = field(default_factory=ServedTokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], Field(description="Precision of weights and activations.")
    ] = interpolation("${policy.precision}")
    engines: Annotated[Positive, Field(description="Number of the generate component's engines that serve this model.")] = 1
    max_total_sequence_length: Annotated[Int, Field(ge=2, description="Maximum tokens of a prompt and its answer.")] = (
        interpolation("${policy.max_total_sequence_length}")
    )


@dataclass
class JudgeConfig(ServedModelConfig):
    """The judge of tasks of kind comparison, multi_turn_rating and refusal: a model of the job, or an endpoint."""

    env_name: Annotated[
        Text | None,
        Field(description="In place of model_name: key under `env` of an llm_judge environment. Its endpoint is the judge."),
    ] = None
    max_new_tokens: Annotated[Positive, Field(description="With model_name: maximum tokens of a reply.")] = 1024
    temperature: Annotated[
        Float,
        Field(ge=0, description="With model_name: sampling temperature. 0: greedy. A repeated prompt gets at least 0.7."),
    ] = 0.0
    top_p: Annotated[Float, Field(gt=0, le=1, description="With model_name: nucleus sampling.")] = 1.0
    tries: Annotated[
        Positive, Field(description="Maximum tries of a prompt, with different seeds, until a reply has a verdict.")
    ] = 3


@dataclass
class RewardModelConfig(ServedModelConfig):
    """The reward model of tasks of kind preference: a sequence classifier with one label.

    null: such tasks are skipped. policy.model_name: the evaluated model is a reward model; all engines serve it, and only
    tasks of kind preference are asked. Another model: engines of its own.
    """
