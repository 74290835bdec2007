"""Check the types and ranges of the values of a config.json. transformers would report errors only when it builds a model.

The checks cover the keys that sizes, attention and engines read. `rope.py` checks the keys of rotary embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from pipeline.models import FAMILIES, rope
from pipeline.recipe.problems import Problem

ALIASES = {"kimi_k2": "deepseek_v3"}
"""A `model_type` that transformers does not know -> the `model_type` of the same model in transformers."""
MULTIMODAL = "multimodal_config"
"""The key of the whole config.json of a multimodal model, where its language model's keys are merged into those of the file."""
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "max_position_embeddings", "kv_lora_rank", "v_head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "sliding_window", "linear_num_key_heads", "linear_num_value_heads"),
)
COUNTS = (  # 0 in dense models of a family that also has models with experts
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "first_k_dense_replace", "q_lora_rank"),
)
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
"""Sizes that every released config.json of `FAMILIES` has, but for `_OPTIONAL`. transformers would take its default."""
_OPTIONAL = {
    "gemma3_text": ("num_attention_heads", "vocab_size"),
    "nemotron_h": ("num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "qwen3_5_text": ("num_attention_heads",),
    "qwen3_5_moe_text": ("num_attention_heads", "intermediate_size"),
}
SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm", "norm_topk_prob")
NUMBERS = ("rms_norm_eps", "layer_norm_epsilon", "initializer_range", "attn_logit_softcapping", "final_logit_softcapping")
MAPPINGS = ("quantization_config", "text_config", "vision_config")
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "auto")


def problems(key: str, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each value of config.json whose type or range transformers does not accept.

    key: the recipe's key of the model. config: of a multimodal family, the keys of its language model. Absent keys and null
    are no problems.
    """
    given = {name: value for name, value in config.items() if value is not None}
    found = dict(_wrong(given))
    for name, expected in found.items():
        yield Problem(key, "wrong-type", f"config.json has {name}={given[name]!r}; expected {expected}")
    if not given.get("model_type"):
        what = "config.json has no model_type; expected the family of the model, such as llama"
        yield Problem(key, "missing-value", what)
    family = ALIASES.get(str(given.get("model_type")), str(given.get("model_type")))
    for name in REQUIRED if family in FAMILIES else ():
        if name not in given and name not in _OPTIONAL.get(family, ()):
            what = f"config.json of this {family} model has no '{name}'. Try to download the model again"
            yield Problem(key, "missing-value", what)
    kinds, layers = given.get("layer_types"), given.get("num_hidden_layers")
    if not found and kinds is not None and layers is not None and len(kinds) != layers:
        what = f"config.json has {len(kinds)} layer_types; expected {layers}, its num_hidden_layers"
        yield Problem(key, "contradiction", what)
    yield from rope.problems(key, config)


def _wrong(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, description of the expected values) for each value with a wrong type or range."""
    family = str(given.get("model_type"))
    listed = family not in FAMILIES and family not in ALIASES  # other families may have a list with a value for each layer
    for name, value in given.items():
        if name in (*SIZES, *COUNTS) and not (listed and isinstance(value, list)):
            if type(value) is not int or value < (name in SIZES):
                yield name, "a whole number above 0" if name in SIZES else "a whole number of at least 0"
        elif name in SWITCHES and not isinstance(value, bool):
            yield name, "true or false"
        elif name in NUMBERS and not (_is_number(value) and 0 <= value < math.inf):
            yield name, "a number of at least 0"
        elif name in MAPPINGS and not isinstance(value, Mapping):
            yield name, "a mapping or null"
        elif name in ("model_type", "hidden_act") and not isinstance(value, str):
            yield name, "a string"
        elif name in ("architectures", "layer_types") and not (
            isinstance(value, list) and all(isinstance(one, str) for one in value)
        ):
            yield name, "a list of texts"
        elif name in ("dtype", "torch_dtype") and value not in DTYPES:
            yield name, f"one of {', '.join(DTYPES)}"


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
