"""The recipe's keys of sampling: `policy.generation`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.values import Bool, Float, Int, Positive, Text, Variables, interpolation


@dataclass
class ColocatedConfig:
    """Train and generate ranks take turns on the same GPUs."""

    enabled: Annotated[Bool, Field(description="Whether they do.")] = False
    refit: Annotated[
        Literal["ipc", "host"],
        Field(
            description="How a refit moves weights within a node. ipc: receivers map the sender's memory, by CUDA IPC on GPUs;"
            " as host where they cannot. host: through host memory, by gloo. refit_transport=broadcast always goes through host"
            " memory."
        ),
    ] = "ipc"


@dataclass
class VLLMConfig:
    """vLLM's engines."""

    tensor_parallel_size: Annotated[Positive, Field(description="Ranks of an engine that share each layer.")] = 1
    pipeline_parallel_size: Annotated[Positive, Field(description="Pipeline stages of an engine.")] = 1
    expert_parallel_size: Annotated[
        Positive, Field(description="1: experts are cut like other weights. tensor_parallel_size: whole experts are spread.")
    ] = 1
    gpu_memory_utilization: Annotated[
        Float, Field(ge=0.01, le=1, description="Share of a GPU's memory that an engine takes.")
    ] = 0.6
    max_model_len: Annotated[Int, Field(ge=2, description="Tokens of the longest prompt with its answer.")] = interpolation(
        "${policy.max_total_sequence_length}"
    )
    enforce_eager: Annotated[Bool, Field(description="Do without CUDA graphs.")] = False
    enable_prefix_caching: Annotated[Bool, Field(description="Share keys and values of equal beginnings.")] = True
    precision: Annotated[
        Literal["auto", "fp8"],
        Field(
            description="auto: policy.precision. fp8: linear layers in 8 bits, scaled in blocks of 128 x 128, quantized again"
            " at every refit."
        ),
    ] = "auto"
    quantization_ignored_layer_kws: Annotated[
        list[Text] | None, Field(description="Layers with one of these in their names are not quantized.")
    ] = None
    env_vars: Annotated[Variables, Field(description="Environment variables of the generate ranks.")] = field(
        default_factory=dict
    )


@dataclass
class RefitConfig:
    """The transfer of weights from the train ranks to the generate ranks."""

    bucket_bytes: Annotated[
        Positive,
        Field(
            description="Bytes that a rank sends, or receives, in one round. It stages at most three times as much; four times"
            " where ranks share GPUs on several nodes."
        ),
    ] = 256 << 20
    digest: Annotated[Bool, Field(description="Prove after every refit that both ends hold the same values.")] = True


@dataclass
class GenerationConfig:
    """Sampling. The val_ keys are for validation; NeMo-RL allows them to differ from training only with NeMo Gym."""

    backend: Annotated[Literal["vllm", "transformers"], Field(description="What samples.")] = "vllm"
    max_new_tokens: Annotated[
        Positive, Field(description="Most tokens of an answer, or of a turn. max_total_sequence_length bounds it too.")
    ] = 512
    temperature: Annotated[Float, Field(gt=0, description="Temperature. It divides logits in training too.")] = 1.0
    top_p: Annotated[Float, Field(gt=0, le=1, description="Nucleus sampling: share of the probability.")] = 1.0
    top_k: Annotated[Positive | None, Field(description="Sample from so many of the likeliest tokens. null: all.")] = None
    val_temperature: Annotated[Float, Field(ge=0, description="Temperature in validation. 0: greedy.")] = interpolation(
        "${.temperature}"
    )
    val_top_p: Annotated[Float, Field(gt=0, le=1, description="top_p in validation.")] = interpolation("${.top_p}")
    val_top_k: Annotated[Positive | None, Field(description="top_k in validation.")] = interpolation("${.top_k}")
    stop_token_ids: Annotated[
        list[Int] | None, Field(description="Tokens that end an answer, besides the tokenizer's and the model's own.")
    ] = None
    max_num_seqs: Annotated[Positive, Field(description="Completions that one engine decodes at once.")] = 256
    environment_process: Annotated[
        Bool, Field(description="Run environments in a process beside each engine. false: in threads of the engine's process.")
    ] = True
    refit_transport: Annotated[
        Literal["planned", "delta", "broadcast"],
        Field(
            description="planned: each rank receives its own shard. delta: what changed of it. broadcast: every rank receives"
            " all weights from rank 0."
        ),
    ] = "planned"
    refit_cfg: RefitConfig = field(default_factory=RefitConfig)
    vllm_cfg: VLLMConfig = field(default_factory=VLLMConfig)
    vllm_kwargs: Annotated[dict[str, Any], Field(description="More arguments of vllm.LLM.")] = field(default_factory=dict)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
