"""Greedy completions of a Hugging Face checkpoint by vLLM as its own documentation uses it, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def greedy(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return token ids, with the end-of-sequence token where there is one."""
    request = json.dumps({"model": str(model), "prompts": prompts, "max_tokens": max_tokens})
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run([sys.executable, __file__], input=request, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    from vllm import LLM, SamplingParams

    request = json.loads(sys.stdin.read())
    engine = LLM(
        model=request["model"], dtype="float32", enforce_eager=True, max_model_len=48, kv_cache_memory_bytes=64 << 20, seed=0
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    print(json.dumps([list(o.outputs[0].token_ids) for o in engine.generate(prompts, sampling, use_tqdm=False)]), flush=True)
    os._exit(0)  # vLLM's teardown has nothing to add


if __name__ == "__main__":
    main()
