"""SmolLM2's real weights end their turns, wherever the folder or the recipe says how. HETSTEP_SMOLLM2 names the folder.

The same model in three folders: as it is published; with another eos token in its tokenizer and the right one in config.json
alone; and with a base model's tokenizer, whose chat template the recipe gives.
"""

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
from tests.generate.smollm2 import base_tokenizer, eos_in_the_config_alone, needs_smollm2, published
from tests.generate.tiny import Checkpoint, drain, load, policy, single

SUMS = ("2+2", "3+4", "10-7", "5+5")
QUESTIONS = [f"What is {sum}? Answer with the number only." for sum in SUMS]
LIMIT = 60

pytestmark = [pytest.mark.full, needs_smollm2]


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


@pytest.mark.parametrize(
    ("made", "template"),
    [(published, None), (eos_in_the_config_alone, None), (base_tokenizer, CHATML)],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
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
