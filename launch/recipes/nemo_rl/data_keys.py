"""Translate `data`: the data sets, their conversion to prompts and conversations, and the treatment of long records.

`data.default` completes data.train and data.validation. Each may be a list of data sets, which NeMo-RL concatenates and Hetstep
mixes in proportion to their sizes. `dataset_keys.py` translates one data set.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.recipes.nemo_rl.dataset_keys import Dataset
from launch.recipes.translation.rules import Ignored, Only, Same, apply, if_set
from launch.recipes.translation.translator import Translator
from pipeline.algorithms import PAIRED

SEVERAL = {"data.train": "data.datasets", "data.validation": "data.validations"}
DATA = (
    Same("data.shuffle"),
    Same("data.max_input_seq_length", if_set),
    Only(
        "data.use_multiple_dataloader",
        (False, None),
        "a custom data loader",
        "false, which mixes the data sets in proportion to their sizes",
    ),
    Ignored("data.custom_dataloader data.num_prompts_per_dataloader data.num_workers"),
    # A few recipes set these next to data.train; NeMo-RL does not read them there.
    Ignored("data.dataset_name data.prompt_file data.add_system_prompt"),
)


def translate(t: Translator, algorithm: str, path: Path) -> bool:
    """Translate the section, and return whether there are validation data."""
    default = t.consume("data.default") or {}
    sets = {key: _sets(t, key) for key in SEVERAL}
    train, validation = sets.values()
    if not train:
        message = "got no data set to train on. Try data.train.dataset_name=..., or data_path=FILE.jsonl"
        t.problem("data.train", "missing-value", message)
    names: set[str] = set()  # names of all data sets: a held-out split is validated under its data set's name
    held_out = 0
    for key, datasets in sets.items():
        for i, fields in enumerate(datasets):
            source, target = key, key
            if len(datasets) > 1:
                source, target = f"{key}[{i}]", f"{SEVERAL[key]}.{_unique_name({**default, **fields}, names)}"
            held_out += Dataset(t, algorithm, source, target, fields, default, path).translate()
        if len(datasets) > 1:
            t.put(key, None)
        if not isinstance(t.get(key), Mapping) or not datasets:
            t.consume(key)
    if held_out + len(validation) > 1:
        t.change(
            "data.validation",
            "the maximum number of samples applies to each data set; in NeMo-RL it applies to all data sets together",
        )
    if len(train) > 1 and t.get("data.shuffle") is False:
        t.change("data.shuffle=false", "the data sets are mixed, each in its order; NeMo-RL concatenates them")
    t.put("data.overlong_prompts", "drop", "data.max_input_seq_length")
    message = "longer records are dropped; NeMo-RL keeps them in the batch and leaves them out of the loss"
    t.change("data.max_input_seq_length", message)
    if algorithm in PAIRED:
        t.put("data.bad_records", "drop", "data.train")
        t.change("data.train", "pairs with equal answers are dropped; NeMo-RL keeps them, with a constant loss")
    if algorithm == "sft":
        _turns(t)
    apply(t, DATA)
    return bool(held_out or validation)


def environments(t: Translator) -> list[str]:
    """Return the names of all environments that judge the answers of data sets."""
    default = t.get("data.default.env_name")
    names = [dataset.get("env_name", default) for key in SEVERAL for dataset in _sets(t, key)]
    return [name for name in dict.fromkeys(names) if name is not None]


def _sets(t: Translator, key: str) -> list[dict[str, Any]]:
    """Return the list of data sets at a key, which holds one data set, a list of data sets or nothing."""
    value = t.get(key)
    return [dict(value)] if isinstance(value, Mapping) and value else list(value or [])


def _unique_name(fields: Mapping[str, Any], names: set[str]) -> str:
    """Return a name for one of several data sets that differs from `names`, and add it to them. Metric names contain it."""
    source = Path(str(fields.get("data_path") or fields.get("dataset_name"))).stem
    name = re.sub(r"[^A-Za-z0-9-]+", "_", source).strip("_-") or "data"
    numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    names.add(unique := next(candidate for candidate in numbered if candidate not in names))
    return unique


def _turns(t: Translator) -> None:
    """Translate the keys for the first and last tokens of a conversation.

    NeMo-RL adds the tokenizer's bos at the start and its eos at the end, unless the template adds them. The translated template
    does the same.
    """
    bos, eos = (t.consume(f"data.add_{token}", True) for token in ("bos", "eos"))
    if t.consume("data.add_generation_prompt", False) is not True:
        t.change("data.add_generation_prompt=false", "the loss does not cover what the template puts before an answer")
    key = "policy.tokenizer.chat_template"
    template = t.layer.get("policy", {}).get("tokenizer", {}).get("chat_template")
    if template is not None:
        t.put(key, _add_ends(template, bos, eos))
    elif bos or eos:
        t.change("data.add_bos, data.add_eos", "the first and last tokens come from the tokenizer's template only")


def _add_ends(template: str, bos: bool, eos: bool) -> str:
    """Return the chat template, extended so that it adds a missing bos, and a missing eos after an answer.

    bos, eos: whether to add each of these tokens.
    """
    before = "{% if bos_token and not rendered.startswith(bos_token) %}{{ bos_token }}{% endif %}" if bos else ""
    behind = (
        "{% if messages[-1]['role'] == 'assistant' and eos_token and not rendered.rstrip('\\n').endswith(eos_token) %}"
        "{{ eos_token }}{% endif %}"
        if eos
        else ""
    )
    return f"{{% set rendered %}}{template}{{% endset %}}{before}{{{{ rendered }}}}{behind}" if bos or eos else template
