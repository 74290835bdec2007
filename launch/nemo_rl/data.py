"""`data`: how records become prompts and conversations, and what happens to those that are too long.

`data.default` fills in what data.train and data.validation leave out, each of which may be a list: several data sets are laid
end to end there, and are mixed by their numbers of records here. What a data set itself may say is in `datasets.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.nemo_rl.datasets import Dataset
from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Only, apply, ignored, same
from pipeline.algorithms import PAIRED

DATA = (
    same("data.shuffle"),
    Only(("data.use_multiple_dataloader",), (False, None), Feature.CUSTOM_DATALOADER, "false mixes them by their sizes"),
    ignored("data.custom_dataloader", "data.num_prompts_per_dataloader", "data.num_workers"),
    # A few recipes have these beside data.train, where nothing of NeMo-RL reads them.
    ignored("data.dataset_name", "data.prompt_file", "data.add_system_prompt"),
)


def translate(ledger: Ledger, algorithm: str, path: Path) -> bool:
    """Whether there is something to validate on."""
    default = ledger.take("data.default") or {}
    train, validation = _given(ledger, "data.train"), _given(ledger, "data.validation")
    if not train:
        ledger.problem("data.train", "there is no data set to train on; data.train.dataset_name=..., or data_path=FILE.jsonl")
    several = {"data.train": "data.datasets", "data.validation": "data.validations"}
    names: set[str] = set()  # of all, since what one holds out is validated on under its name
    held_out = 0
    for key, those in (("data.train", train), ("data.validation", validation)):
        for place, given in enumerate(those):
            source, ours = key, key
            if len(those) > 1:
                source, ours = f"{key}[{place}]", f"{several[key]}.{_named({**default, **given}, names)}"
            held_out += Dataset(ledger, algorithm, source, ours, given, default, path).translate()
        if len(those) > 1:
            ledger.put(key, None, key)
    if held_out + len(validation) > 1:
        ledger.change("data.validation", "of each data set as many records are validated on as there of all together")
    if len(train) > 1 and ledger.get("data.shuffle") is False:
        ledger.change("data.shuffle=false", "the data sets are mixed, each in its order; there one comes after another")
    _lengths(ledger)
    if algorithm in PAIRED:
        ledger.put("data.bad_records", "drop", "data.train")
        ledger.change("data.train", "pairs of the same answers are left out; there they count, with a constant loss")
    if algorithm == "sft":
        _turns(ledger)
    apply(ledger, DATA)
    return bool(held_out or validation)


def environments(ledger: Ledger) -> list[str]:
    """Their names, as far as a data set has answers that they judge."""
    names = []
    for key in ("data.train", "data.validation"):
        given = ledger.get(key)
        for one in given if isinstance(given, list) else [given] if given else []:
            name = one.get("env_name", ledger.get("data.default.env_name"))
            if name is not None and name not in names:
                names.append(name)
    return names


def _given(ledger: Ledger, key: str) -> list[dict[str, Any]]:
    """The data sets: one by itself, those of a list, or none."""
    given = ledger.get(key)
    if isinstance(given, Mapping) and given:
        return [dict(given)]
    ledger.take(key)
    return given or []


def _named(fields: Mapping[str, Any], names: set[str]) -> str:
    """A name for one of several, which no other has; a part of metrics' names."""
    where = Path(str(fields.get("data_path") or fields.get("dataset_name"))).stem
    name = re.sub(r"[^A-Za-z0-9-]+", "_", where).strip("_-") or "data"
    number = next(number for number in itertools.count(1) if (f"{name}_{number}" if number > 1 else name) not in names)
    names.add(found := f"{name}_{number}" if number > 1 else name)
    return found


def _lengths(ledger: Ledger) -> None:
    longest = ledger.take("data.max_input_seq_length")
    if longest is not None:
        ledger.put("data.max_input_seq_length", longest, "data.max_input_seq_length")
    ledger.put("data.overlong_prompts", "drop", "data.max_input_seq_length")
    ledger.change(
        "data.max_input_seq_length", "what is longer is left out; there it stays in its batch, and does not count in the loss"
    )


def _turns(ledger: Ledger) -> None:
    """Theirs puts the tokenizer's bos before and its eos behind a conversation, unless the template has: so does ours."""
    bos, eos = (ledger.take(f"data.add_{token}", True) for token in ("bos", "eos"))
    if ledger.take("data.add_generation_prompt", False) is not True:
        ledger.change("data.add_generation_prompt=false", "what the template puts before an answer does not count in the loss")
    key = "policy.tokenizer.chat_template"
    template = ledger.get(key)
    if template is None and ledger.has(key):
        template = ledger.layer.get("policy", {}).get("tokenizer", {}).get("chat_template")
    if template is None or template.lower() == "default":
        if bos or eos:
            ledger.change("data.add_bos, data.add_eos", "the tokenizer's template alone says how a text begins and ends")
        return
    ours = ledger.layer["policy"]["tokenizer"]["chat_template"]
    ledger.put(key, _framed(ours, bos, eos), key)


def _framed(template: str, bos: bool, eos: bool) -> str:
    """The template with bos before and eos behind what it renders, where that is missing, and only behind an answer."""
    before = "{% if bos_token and not rendered.startswith(bos_token) %}{{ bos_token }}{% endif %}" if bos else ""
    behind = (
        "{% if messages[-1]['role'] == 'assistant' and eos_token and not rendered.rstrip('\\n').endswith(eos_token) %}"
        "{{ eos_token }}{% endif %}"
        if eos
        else ""
    )
    return f"{{% set rendered %}}{template}{{% endset %}}{before}{{{{ rendered }}}}{behind}" if bos or eos else template
