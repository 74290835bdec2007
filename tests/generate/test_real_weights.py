"""SmolLM2's real weights end their turns, wherever the folder or the recipe says how. HETSTEP_SMOLLM2 names the folder.

The same model in three folders: as it is published; with another eos token in its tokenizer and the right one in config.json
alone; and with a base model's tokenizer, whose chat template the recipe gives.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import DataConfig, DatasetConfig, PolicyConfig
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.stop_tokens import stop_tokens
from pipeline.generate import build
from pipeline.types import Sampling
from tests.data.test_chat import CHATML
from tests.generate.tiny import Checkpoint, drain, load, policy, single

SMOLLM2 = os.environ.get("HETSTEP_SMOLLM2", "")
SUMS = ("2+2", "3+4", "10-7", "5+5")
QUESTIONS = (*(f"What is {sum}? Answer with the number only." for sum in SUMS), "Say hello.")
LIMIT = 60

pytestmark = [pytest.mark.full, pytest.mark.skipif(not SMOLLM2, reason="HETSTEP_SMOLLM2 does not name SmolLM2's folder")]


def published(folder: Path) -> Path:
    """Return a copy of the model whose weights are a link."""
    folder.mkdir()
    for path in Path(SMOLLM2).iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, folder)
    return folder


def edited(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def eos_in_the_config_alone(folder: Path) -> Path:
    published(folder)
    (folder / "generation_config.json").unlink()
    edited(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edited(folder / "config.json", eos_token_id=[0, 2])
    return folder


def base_tokenizer(folder: Path) -> Path:
    published(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    edited(folder / "tokenizer_config.json", eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<|endoftext|>")
    edited(folder / "config.json", eos_token_id=0)
    return folder


def answers(model: PolicyConfig) -> list[tuple[int, str, str]]:
    """Return the number of tokens, the finish and the text of each answer."""
    tokenizer = load_tokenizer(model.tokenizer)
    encoder = Encoder(tokenizer, model.tokenizer, DataConfig(), DatasetConfig())
    engine = build(model, engine_ranks=1, rank_in_engine=0, seed=0)
    load(engine, Checkpoint(Path(model.model_name), None).weights().items(), version=0)
    sampling = Sampling(temperature=0.0, max_new_tokens=LIMIT)
    asked = [
        replace(single(encoder.prompt({"input": question}), id=str(i)), sampling=sampling)
        for i, question in enumerate(QUESTIONS)
    ]
    done = drain(engine, asked)
    engine.close()
    found = [done[str(i)] for i in range(len(QUESTIONS))]
    return [(len(np.atleast_1d(one.tokens)), one.finish, tokenizer.decode(one.tokens)) for one in found]


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
@pytest.mark.parametrize(
    ("made", "template"),
    [(published, None), (eos_in_the_config_alone, None), (base_tokenizer, CHATML)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_answers_end(tmp_path, backend, made, template):
    folder = made(tmp_path / "model")
    model = policy(folder, backend, max_num_seqs=4, max_model_len=256, vllm_kwargs={"kv_cache_memory_bytes": 1 << 28})
    model = replace(model, tokenizer=replace(model.tokenizer, chat_template=template))
    stops = stop_tokens(model)
    found = answers(model)
    print(f"\n{made.__name__}, {backend}: stop tokens {[str(token) for token in stops.tokens]}")
    for question, (count, finish, text) in zip(QUESTIONS, found, strict=True):
        print(f"  {count:3d} tokens, {finish}: {question} -> {text!r}")
    assert 2 in stops.ids
    assert all(finish == "stop" and count < LIMIT and text.endswith("<|im_end|>") for count, finish, text in found)
