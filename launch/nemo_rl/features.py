"""What NeMo-RL recipes ask for and we do not have: one clear name for each, so that problems can be counted by it."""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    # The algorithm
    ASYNC = "asynchronous training"
    GYM = "NeMo Gym"
    ENVIRONMENT = "this environment"
    VERIFIER = "this verifier of answers"
    SEVERAL_REWARDS = "several rewards of one answer"
    REWARD_PENALTIES = "penalties on single tokens of reasoning or tool calls"
    POSITIVE_NLL = "a likelihood term on right answers"
    EARLY_STOP = "an early stop by a validation metric"
    DELAYED_VALIDATION = "a first step of validation"
    ADVANTAGE = "this estimator of advantages"
    LAST_TURN_ONLY = "a loss on the last turn alone"
    SEVERAL_TEACHERS = "several teachers"
    CROSS_TOKENIZER = "distillation between tokenizers"
    # Training
    FP8_TRAINING = "training in 8 bits"
    QUANTIZATION = "quantization-aware training"
    DRAFT = "training of a draft model"
    MTP = "multi-token prediction"
    ROUTER_REPLAY = "replay of the sampler's routing"
    MEGATRON_LORA = "LoRA on Megatron-Core"
    LORA_OPTION = "this option of LoRA"
    DTENSOR_CONTEXT = "context parallelism of FSDP2"
    DTENSOR_EXPERTS = "expert parallelism of FSDP2"
    CUSTOM_PLAN = "a tensor-parallel plan of one's own"
    VIRTUAL_PIPELINE = "interleaved pipeline stages"
    CUDA_GRAPHS = "CUDA graphs in training"
    OFFLOADING = "offloading of activations or optimizer state"
    OPTIMIZER = "this optimizer"
    BALANCING = "a loss that balances the experts' load"
    FREEZING = "freezing of a part of the model"
    PRETRAINED = "a start from a checkpoint that is not a Hugging Face one"
    DEQUANTIZE = "reading a checkpoint of 8 bits"
    VALUE_BATCHES = "batches of the critic's own"
    # Generation
    BACKEND = "this generation backend"
    DRAFTING = "speculative decoding with a model that drafts"
    MXFP8_GENERATION = "generation in MXFP8"
    MIXED_GENERATION = "generation with some layers in 8 bits by their place"
    FP8_CACHE = "a KV cache in 8 bits"
    STOP_STRINGS = "stop strings"
    RAW_LOGPROBS = "log-probs before temperature"
    ENGINE_DATA_PARALLEL = "experts spread over several engines"
    # Data
    CUSTOM_DATALOADER = "a data loader of one's own"
    DATASET = "this data set"
    PROCESSOR = "this data processor"
    MULTIMODAL = "images, sound or video"


def lacking(key: str, value: object, feature: Feature, instead: str = "") -> str:
    """The problem of a key whose value asks for a feature that we do not have. instead: what would do."""
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    shown = shown if len(shown) < 60 else shown[:57] + "..."
    return f"{key}: {shown} asks for {feature}, which is not supported" + (f"; {instead}" if instead else "")


def feature_of(problem: str) -> Feature | None:
    """The feature that a problem of `lacking` names; None of any other problem."""
    return next((feature for feature in Feature if f" asks for {feature}, which is not supported" in problem), None)
