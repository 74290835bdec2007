"""Keys of sampling: `policy.generation`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.recipe.values import Bool, Float, Int, Positive, Text, interpolation

MOST_SEQUENCES = 256
"""`max_num_seqs` if it is null and vLLM's own default does not apply: with the transformers backend, and for models with
state-space layers, for which vLLM refuses more sequences than its cache has room for (vllm/config/compilation.py, "exceeds
available Mamba cache blocks")."""


@dataclass
class ColocatedConfig:
    """Train and generate ranks that take turns on the same GPUs."""

    enabled: Bool = False
    """Let train and generate ranks take turns on the same GPUs."""
    refit: Literal["ipc", "host"] = "ipc"
    """How a refit moves weights within a node. ipc: receivers map the sender's memory, with CUDA IPC on GPUs, and fall back to
    host where that is impossible. host: through host memory, with gloo. refit_transport=broadcast always uses host memory."""


@dataclass
class VLLMConfig:
    """Options of vLLM's engines."""

    tensor_parallel_size: Positive = 1
    """Tensor-parallel ranks of an engine."""
    pipeline_parallel_size: Positive = 1
    """Pipeline stages of an engine."""
    expert_parallel_size: Positive = 1
    """1: experts are tensor-parallel like other weights. tensor_parallel_size: each rank holds whole experts."""
    gpu_memory_utilization: Annotated[Float, Field(ge=0.01, le=1)] = 0.6
    """Fraction of a GPU's memory that an engine uses."""
    max_model_len: Annotated[Int, Field(ge=2)] = interpolation("${policy.max_total_sequence_length}")
    """Maximum number of tokens of a prompt and its answer."""
    enforce_eager: Bool | None = None
    """Without compiled code and CUDA graphs. null: eager on CPUs, where compilation takes minutes."""
    enable_prefix_caching: Bool = True
    """Reuse the KV cache of common prefixes."""
    precision: Literal["auto", "fp8"] = "auto"
    """auto: policy.precision. fp8: linear layers in 8 bits with scales for blocks of 128 x 128, quantized again at every
    refit."""
    quantization_ignored_layer_kws: list[Text] | None = None
    """Layers whose names contain one of these texts are not quantized."""


@dataclass
class RefitConfig:
    """The transfer of weights from train ranks to generate ranks."""

    bucket_bytes: Positive = 256 << 20
    """Maximum bytes that a rank sends, or receives, in one round. A rank stages at most three times as much, or four times
    where ranks share GPUs on several nodes."""
    digest: Bool = True
    """Verify after every refit that train and generate ranks hold the same weights."""


@dataclass
class GenerationConfig:
    """Sampling. The val_ keys apply in validation. NeMo-RL allows different values there only with NeMo Gym."""

    backend: Literal["vllm", "transformers"] = "vllm"
    """Inference engine."""
    max_new_tokens: Positive = 512
    """Maximum tokens of an answer, or of a turn. max_total_sequence_length limits it too."""
    temperature: Annotated[Float, Field(gt=0)] = 1.0
    """Sampling temperature. Training divides logits by it too."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: total probability of the tokens to sample from."""
    top_k: Positive | None = None
    """Number of most likely tokens to sample from. null: all."""
    val_temperature: Annotated[Float, Field(ge=0)] = interpolation("${.temperature}")
    """Sampling temperature in validation. 0: greedy."""
    val_top_p: Annotated[Float, Field(gt=0, le=1)] = interpolation("${.top_p}")
    """top_p in validation."""
    val_top_k: Positive | None = interpolation("${.top_k}")
    """top_k in validation."""
    stop_token_ids: list[Int] | None = None
    """Token ids that end an answer, in addition to the model's end tokens from tokenizer, config.json, generation_config.json
    and chat template. submit.py show=true lists the model's."""
    stop_strings: list[Annotated[Text, Field(min_length=1)]] | None = None
    """Texts that end an answer, or a turn, at the token that completes the text. The answer's tokens include it; the answer's
    text, which environments get, ends before it. Needed if a chat template ends turns with several tokens."""
    tool_parser: Text | None = None
    """vLLM's parser of the policy's tool calls, such as hermes, for env.NAME.kind=tools. null: by the chat template."""
    reasoning_parser: Text | None = None
    """vLLM's parser of reasoning, in which tool calls do not count. null: by marks in the chat template, such as <think>."""
    max_num_seqs: Annotated[
        Positive | None,
        Field(
            description="Maximum completions that one engine decodes concurrently. null: vLLM's default for the GPU, 1024 on an"
            f" H100; {MOST_SEQUENCES} for models with state-space layers and with the transformers backend."
        ),
    ] = None
    refit_transport: Literal["planned", "delta", "broadcast"] = "planned"
    """planned: each rank receives its own shard. delta: only the changed values of its shard. broadcast: every rank receives
    all weights from rank 0."""
    lora_refit: Literal["merged", "adapter"] = "merged"
    """What a refit of a policy with adapters sends. merged: whole weights, with adapters merged. adapter: only the adapters,
    which vLLM applies to the base weights: 1.66 GB in place of 17.6 GB to a rank for Llama-70B at rank 64. Refused for experts,
    DoRA, kv_b_proj and gpt-oss, which vLLM cannot serve."""
    refit_cfg: RefitConfig = field(default_factory=RefitConfig)
    vllm_cfg: VLLMConfig = field(default_factory=VLLMConfig)
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vllm.LLM, such as speculative_config (n-grams are tested)."""
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
