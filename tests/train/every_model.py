"""Which causal language models of transformers the FSDP2 backend trains: python -m tests.train.every_model [MODEL_TYPE ...].

For each model type of transformers' auto mapping: a tiny random model, packed, against Hugging Face eager in float64. Prints
one line each, and the counts: `trains`, `refused` (when it is built, by reason), `raises` (at its first batch), `differs` (none
may), `untested` (no tiny model could be made, or eager fails).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pipeline.config import RecipeError
from tests.train import cases, ranks

SECONDS = 40  # of one model
WIDTHS = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "word_embed_proj_dim"), 32
) | dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "decoder_ffn_dim", "shared_expert_intermediate_size"), 48)
COUNTS = {
    "vocab_size": cases.VOCABULARY,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    "head_dim": 8,
    "sliding_window": 4,
    "moe_intermediate_size": 24,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "linear_num_key_heads"), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    "is_decoder": True,
}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # latent attention: heads of positions, and as many keys as queries
MAMBA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "state_size": 8, "time_step_rank": 4}
HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 4}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # for models that need them; eager gives padding no gradient
OWN: dict[str, dict[str, Any]] = {  # keys that a family needs besides, or (None) that it must not get
    **dict.fromkeys(
        (
            *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear"),
            *("longcat_flash", "minicpm3", "youtu"),
        ),
        LATENT,
    ),
    "falcon": {"head_dim": None, "num_kv_heads": 4, "new_decoder_architecture": False, "alibi": False},
    "falcon_mamba": MAMBA,
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": {
        **HEADS,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "cwm": TOKENS | {"layer_types": ["sliding_attention", "full_attention"]},
    "modernbert-decoder": TOKENS,
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"), TOKENS
    ),
    **{name: {"pad_token_id": 2, "head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": TOKENS | {"languages": ["en_XX"], "default_language": "en_XX"},
}


def tiny(model_type: str) -> PreTrainedConfig:
    """Return a small configuration: sizes of the keys that the model's own configuration has."""
    default = AutoConfig.for_model(model_type)
    default = default.get_text_config(decoder=True)
    known = {name: value for name, value in {**WIDTHS, **COUNTS}.items() if getattr(default, name, None) is not None}
    known |= {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(default, name)}
    if getattr(default, "layer_types", None):
        kinds = list(dict.fromkeys(default.layer_types))
        layers = max(2, len(kinds))
        known |= {"layer_types": (kinds * layers)[:layers], "num_hidden_layers": layers}
    known |= OWN.get(model_type, {})
    settable = {name: value for name, value in known.items() if value is not None or name.endswith("_token_id")}
    return type(default)(**{name: value for name, value in settable.items() if not _derived(type(default), name)})


def _derived(config: type[PreTrainedConfig], name: str) -> bool:
    """Return whether a key is a property that the configuration computes."""
    return isinstance(found := getattr(config, name, None), property) and found.fset is None


def tried(model_type: str, folder: Path) -> tuple[str, str]:
    """Return (what became of the model, details)."""
    try:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(tiny(model_type), dtype=torch.float32)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > 2e7:
            return "untested", f"{size / 1e6:.0f} million parameters"
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.2))
        model.save_pretrained(folder)
        logprobs, gradients, _ = cases.eager(folder)
        rounded, _, _ = cases.eager(folder, torch.float32)
    except Exception as error:
        return "untested", f"{type(error).__name__}: {error}"
    try:
        trained = ranks.backend(cases.policy(folder))
    except RecipeError as error:
        return "refused", str(error)
    except Exception as error:
        return "raises", f"at its build, {type(error).__name__}: {error}"
    try:
        batches = [cases.pack(chosen) for chosen in ranks.shares(ranks.Layout(1, 1))[0]]
        expected = [torch.cat([logprobs[i] for i in chosen]) for chosen in ranks.shares(ranks.Layout(1, 1))[0]]
        found = trained.forward(batches)
        trained.step(batches, cases.loss)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    off = max((ours.logprobs - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True))
    of_eager = max((ours - theirs).abs().max().item() for ours, theirs in zip(rounded, logprobs, strict=True))
    largest = max(g.abs().max().item() for g in gradients.values() if g is not None)
    ours = {n: p.grad for n, p in trained._model.hf.named_parameters() if p.grad is not None}
    worst = max(
        (ours[n].double() - g).abs().max().item() / largest for n, g in gradients.items() if g is not None and n in ours
    )
    details = f"log-probs {off:.1e} (eager in float32: {of_eager:.1e}), gradients {worst:.1e}"
    return ("trains" if off < max(1e-5, 4 * of_eager) and worst < 1e-4 else "differs"), details


@contextlib.contextmanager
def limited():
    """Raise TimeoutError after SECONDS."""

    def late(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def main(chosen: list[str]) -> dict[str, str]:
    """Print the table, and return {model type: what became of it}."""
    torch.set_num_threads(1)
    results = {}
    for model_type in chosen or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with limited():
                    result, details = tried(model_type, Path(folder))
            except TimeoutError as error:
                result, details = "untested", str(error)
        results[model_type] = result
        print(f"{model_type:28} {result:9} {' '.join(details.split())[:200]}", flush=True)
    print(dict(Counter(results.values())))
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        store = f"file://{os.path.join(meeting, 'store')}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        main(sys.argv[1:])
        dist.destroy_process_group()
