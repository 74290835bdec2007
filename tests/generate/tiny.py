"""Tiny models with tokenizers, the eager Hugging Face forward as the reference of log-probs, and requests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.boxes import whole
from pipeline.config import GenerationConfig, PolicyConfig, TokenizerConfig, VLLMConfig
from pipeline.config.generation import ColocatedConfig
from pipeline.config.policy import RouterReplayConfig
from pipeline.generate.generate_backend import GenerateBackend, UpdateUnit, WeightUpdate
from pipeline.types import Completion, Request, Sampling

VOCAB, EOS, MAX_MODEL_LEN = 96, 1, 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large, so that distributions are peaked and greedy choices are clear
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # the 128 of FP8 kernels' blocks
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2),
    "llama_blocks": LlamaConfig(**SHAPE | BLOCKS),
    "qwen3_moe_blocks": Qwen3MoeConfig(**SHAPE | BLOCKS, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2),
}


@dataclass
class Checkpoint:
    folder: Path
    model: PreTrainedModel  # float32, eager attention

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as on disk."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def logprobs(self, prompt: np.ndarray, completion: np.ndarray, temperature: float) -> np.ndarray:
        """Return log p(completion[t] | prompt, completion[<t]), [C] float32."""
        tokens = torch.from_numpy(np.concatenate([prompt, completion])).long()
        with torch.no_grad():
            logits = self.model(tokens[None]).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
        return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()

    def greedy(self, prompt: np.ndarray, max_new_tokens: int) -> list[int]:
        tokens = torch.from_numpy(prompt).long()[None]
        out = self.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def save(folder: Path, family: str, seed: int) -> Checkpoint:
    """Return a model and its tokenizer, drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Checkpoint(folder, model.eval())


def policy(
    folder: Path,
    backend: str,
    max_num_seqs: int = 32,
    precision: str = "float32",
    vllm_kwargs: dict[str, Any] | None = None,
    vllm_cfg_precision: str = "auto",
    colocated: bool = False,
    router_replay: bool = False,
    **vllm_cfg,
) -> PolicyConfig:
    settings = {"max_model_len": MAX_MODEL_LEN, "enforce_eager": True, "precision": vllm_cfg_precision} | vllm_cfg
    return PolicyConfig(
        model_name=str(folder),
        tokenizer=TokenizerConfig(name=str(folder)),
        precision=precision,
        generation=GenerationConfig(
            backend=backend,
            max_num_seqs=max_num_seqs,
            vllm_cfg=VLLMConfig(**settings),
            vllm_kwargs=vllm_kwargs or {},
            colocated=ColocatedConfig(enabled=colocated),
        ),
        router_replay=RouterReplayConfig(router_replay),
    )


def load(engine: GenerateBackend, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Load all weights at once, in full."""
    update = engine.update()
    update.load(weights)
    update.commit(version)


def write(update: WeightUpdate, units: Iterable[UpdateUnit], weights: Mapping[str, torch.Tensor]) -> None:
    """Write all regions of these units, which are open together, then finish them."""
    for unit in units:
        for region in unit.regions:
            target = update.target(unit.name, region.tensor)
            view = target.as_strided(region.box.size, region.strides, target.storage_offset() + region.offset)
            tensor = weights[region.name]
            view.copy_(tensor[region.box.within(whole(tuple(tensor.shape)))])
    for unit in units:
        update.finish(unit.name)


def refit(engine: GenerateBackend, weights: Mapping[str, torch.Tensor], version: int, recompute_kv_cache: bool = True) -> None:
    """Write all weights, each rank its own regions; three units are open at a time."""
    update, units = engine.update(), engine.layout()
    for start in range(0, len(units), 3):
        write(update, units[start : start + 3], weights)
    update.commit(version, recompute_kv_cache)


def drain(engine: GenerateBackend, requests: list[Request]) -> dict[str, Completion]:
    """Return each request's completion, by its id."""
    engine.add(requests)
    done: list[Completion] = []
    while engine.pending:
        done += engine.step()
    assert engine.step() == []
    assert sorted(c.id for c in done) == sorted(r.id for r in requests)
    return {completion.id: completion for completion in done}


def requests(groups: int, size: int, seed: int = 0, **sampling) -> list[Request]:
    """Return `size` requests for each of `groups` prompts of different lengths."""
    random = np.random.default_rng(seed)
    settings = Sampling(**{"max_new_tokens": 24} | sampling)
    made = []
    for group in range(groups):
        prompt = random.integers(2, VOCAB, 3 + 4 * group).astype(np.int32)
        seeds = random.integers(0, 2**63, size)
        made += [Request(f"{group}/{k}", prompt, int(seeds[k]), settings) for k in range(size)]
    return made


def single(prompt: np.ndarray, id: str = "a", **sampling) -> Request:
    return Request(id, prompt.astype(np.int32), 0, replace(Sampling(max_new_tokens=24), **sampling))


def destroy_groups() -> None:
    """Destroy torch's default group and vLLM's groups, which this process's next engine would take for its own."""
    if dist.is_initialized():
        if state := sys.modules.get("vllm.distributed.parallel_state"):
            state.destroy_model_parallel()
            state.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
