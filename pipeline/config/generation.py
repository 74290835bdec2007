"""Keys of sampling: `policy.generation`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.recipe.values import Bool, Float, Int, Positive, Text, Variables, interpolation

MOST_SEQUENCES = 256
"""`max_num_seqs` if it is null and vLLM's own default does not apply: with the transformers backend, and for models with
state-space layers, for which vLLM refuses more sequences than its cache has room for (vllm/config/compilation.py, "exceeds
available Mamba cache blocks")."""


@dataclass
class ColocatedConfig:
    """Train and generate ranks that take turns on the same GPUs."""

    enabled: Annotated[Bool, Field(description="Let train and generate ranks take turns on the same GPUs.")] = False
    refit: Annotated[
        Literal["ipc", "host"],
        Field(
            description="How a refit moves weights within a node. ipc: receivers map the sender's memory, with CUDA IPC"
            " on GPUs, and fall back to host where that is impossible. host: through host memory, with gloo."
            " refit_transport=broadcast always uses host memory."
        ),
    ] = "ipc"


@dataclass
class VLLMConfig:
    """Options of vLLM's engines."""

    tensor_parallel_size: Annotated[Positive, Field(description="Tensor-parallel ranks of an engine.")] = 1
    pipeline_parallel_size: Annotated[Positive, Field(description="Pipeline stages of an engine.")] = 1
    expert_parallel_size: Annotated[
        Positive,
        Field(
            description="1: experts are tensor-parallel like other weights. tensor_parallel_size: each rank holds whole"
            " experts."
        ),
    ] = 1
    gpu_memory_utilization: Annotated[
        Float, Field(ge=0.01, le=1, description="Fraction of a GPU's memory that an engine uses.")
    ] = 0.6
    max_model_len: Annotated[Int, Field(ge=2, description="Maximum number of tokens of a prompt and its answer.")] = (
        interpolation("${policy.max_total_sequence_length}")
    )
    enforce_eager: Annotated[
        Bool | None,
        Field(description="Without compiled code and CUDA graphs. null: eager on CPUs, where compilation takes minutes."),
    ] = None
    enable_prefix_caching: Annotated[Bool, Field(description="Reuse the KV cache of common prefixes.")] = True
    precision: Annotated[
        Literal["auto", "fp8"],
        Field(
            description="auto: policy.precision. fp8: linear layers in 8 bits with scales for blocks of 128 x 128,"
            " quantized again at every refit."
        ),
    ] = "auto"
    quantization_ignored_layer_kws: Annotated[
        list[Text] | None, Field(description="Layers whose names contain one of these texts are not quantized.")
    ] = None
    env_vars: Annotated[Variables, Field(description="Environment variables of the generate ranks.")] = field(
        default_factory=dict
    )


@dataclass
class RefitConfig:
    """The transfer of weights from train ranks to generate ranks."""

    bucket_bytes: Annotated[
        Positive,
        Field(
            description="Maximum bytes that a rank sends, or receives, in one round. A rank stages at most three times as"
            " much, or four times where ranks share GPUs on several nodes."
        ),
    ] = 256 << 20
    digest: Annotated[
        Bool, Field(description="Verify after every refit that train and generate ranks hold the same weights.")
    ] = True


@dataclass
class GenerationConfig:
    """Sampling. The val_ keys apply in validation. NeMo-RL allows different values there only with NeMo Gym."""

    backend: Annotated[Literal["vllm", "transformers"], Field(description="Inference engine.")] = "vllm"
    max_new_tokens: Annotated[
        Positive, Field(description="Maximum tokens of an answer, or of a turn. max_total_sequence_length limits it too.")
    ] = 512
    temperature: Annotated[Float, Field(gt=0, description="Sampling temperature. Training divides logits by it too.")] = 1.0
    top_p: Annotated[
        Float, Field(gt=0, le=1, description="Nucleus sampling: total probability of the tokens to sample from.")
    ] = 1.0
    top_k: Annotated[Positive | None, Field(description="Number of most likely tokens to sample from. null: all.")] = None
    val_temperature: Annotated[Float, Field(ge=0, description="Sampling temperature in validation. 0: greedy.")] = (
        interpolation("${.temperature}")
    )
    val_top_p: Annotated[Float, Field(gt=0, le=1, description="top_p in validation.")] = interpolation("${.top_p}")
    val_top_k: Annotated[Positive | None, Field(description="top_k in validation.")] = interpolation("${.top_k}")
    stop_token_ids: Annotated[
        list[Int] | None,
        Field(
            description="Token ids that end an answer, in addition to the model's end tokens from tokenizer, config.json,"
            " generation_config.json and chat template. submit.py show=true lists the model's."
        ),
    ] = None
    stop_strings: Annotated[
        list[Annotated[Text, Field(min_length=1)]] | None,
        Field(
            description="Texts that end an answer, or a turn, at the token that completes the text. The answer's tokens include"
            " it; the answer's text, which environments get, ends before it. Needed if a chat template ends turns with several"
            " tokens."
        ),
    ] = None
    max_num_seqs: Annotated[
        Positive | None,
        Field(
            description="Maximum completions that one engine decodes concurrently. null: vLLM's default for the GPU, 1024 on an"
            f" H100; {MOST_SEQUENCES} for models with state-space layers and with the transformers backend."
        ),
    ] = None
    refit_transport: Annotated[
        Literal["planned", "delta", "broadcast"],
        Field(
            description="planned: each rank receives its own shard. delta: only the changed values of its shard."
            " broadcast: every rank receives all weights from rank 0."
        ),
    ] = "planned"
    lora_refit: Annotated[
        Literal["merged", "adapter"],
        Field(
            description="What a refit of a policy with adapters sends. merged: whole weights, with adapters merged."
            " adapter: only the adapters, which vLLM applies to the base weights: 1.66 GB in place of 17.6 GB to a rank for"
            " Llama-70B at rank 64. Refused for experts, DoRA, kv_b_proj and gpt-oss, which vLLM cannot serve."
        ),
    ] = "merged"
    refit_cfg: RefitConfig = field(default_factory=RefitConfig)
    vllm_cfg: VLLMConfig = field(default_factory=VLLMConfig)
    vllm_kwargs: Annotated[
        dict[str, Any], Field(description="Other arguments of vllm.LLM, such as speculative_config (n-grams are tested).")
    ] = field(default_factory=dict)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
