"""CPU seconds per 1,000 likelihood items: our vLLM engine against lm-evaluation-harness's hf and vllm models, in one run.

    python -m tests.benchmarks.likelihoods      needs lm_eval 0.4.13

Each contender is a process with one thread and the same model, files and items. They take turns, round by round, so that other
load on the machine affects all. An item is a choice: tokenization to log-likelihood. `hellaswag` has 4 endings of 10 to 30
words after 40 to 100 words, `mmlu` 4 letters after 5 worked examples, which questions share. vLLM shares prefixes in blocks, of
128 tokens on CPUs unless told otherwise, and of 16 on GPUs. Prints the median CPU seconds over the rounds, and the largest
difference of a log-likelihood from that of the hf model.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

Pair = tuple[str, str]
ROUNDS, QUESTIONS, LONGEST = 3, {"hellaswag": 40, "mmlu": 40}, 1024
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 8192, "head_dim": 64}
HF_BATCH = 16
CONTENDERS = ("hf", "vllm", "ours", "ours, blocks of 32")
ENGINE = {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}


def main() -> None:
    """Measure all contenders and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        seconds: dict[tuple[str, str], list[float]] = {}
        sums: dict[tuple[str, str], list[float]] = {}
        with running(folder) as ask:
            for _ in range(ROUNDS):
                for contender in CONTENDERS:
                    for task in QUESTIONS:
                        reply = ask(contender, task)
                        seconds.setdefault((contender, task), []).append(reply["seconds"])
                        sums[contender, task] = reply["sums"]
    print("CPU seconds per 1,000 items, against hf, largest difference of a log-likelihood from that of hf")
    for task in QUESTIONS:
        middle = {contender: statistics.median(seconds[contender, task]) for contender in CONTENDERS}
        for contender in CONTENDERS:
            count = len(sums[contender, task])
            off = max(abs(a - b) for a, b in zip(sums[contender, task], sums["hf", task], strict=True))
            each = 1000 * middle[contender] / count
            print(f"{task:10} {contender:20} {each:7.2f}  {middle['hf'] / middle[contender]:5.2f}x faster  {off:.1e}")


def prepare(folder: Path) -> None:
    """Save the model and the items."""
    from pipeline.evaluation import lm_eval_documents
    from tests.evaluation.likelihood_data import records, save_model, task_config, write_jsonl

    save_model(folder / "model", "llama", LONGEST, **SHAPE)
    for form, count in QUESTIONS.items():
        rows = (
            [long_hellaswag(random.Random(number)) for number in range(count)] if form == "hellaswag" else records(form, count)
        )
        write_jsonl(folder / form / "test.jsonl", rows)
        write_jsonl(folder / form / "dev.jsonl", records(form, 30, seed=1))
        shots = {"num_few_shot": 5, "few_shot_split": "dev"} if form == "mmlu" else {}
        config = task_config(form, folder / form, **shots)
        documents = lm_eval_documents.build(form, config, lm_eval_documents.manager([form], None))
        for task in documents.tasks.values():
            task.build_all_requests()
        pairs = [instance.args for task in documents.tasks.values() for instance in task.instances]
        (folder / f"{form}.json").write_text(json.dumps(pairs))


def long_hellaswag(chance: random.Random) -> dict[str, Any]:
    """Return a record of the lengths that are common there."""
    from tests.evaluation.likelihood_data import sentence

    endings = [sentence(chance, 10, 30) for _ in range(4)]
    context = {"activity_label": "Washing", "ctx_a": sentence(chance, 40, 100), "ctx_b": "she"}
    return {**context, "endings": endings, "label": "0"}


@contextmanager
def running(folder: Path) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """Start the contenders, and yield a function (contender, task) -> its reply."""
    processes = {
        contender: subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.likelihoods", contender, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for contender in CONTENDERS
    }

    def ask(contender: str, task: str) -> dict[str, Any]:
        process = processes[contender]
        assert process.stdin and process.stdout
        process.stdin.write(f"{task}\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{contender} ended with {process.wait()}")

    try:
        yield ask
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def contend(contender: str, folder: Path) -> None:
    """Reply to tasks' names on stdin: the seconds and the log-likelihoods of the task's items."""
    score = {"hf": hugging_face, "vllm": their_vllm}.get(contender, lambda folder: ours(folder, contender))(folder)
    items: dict[str, list[Pair]] = {
        task: [(context, choice) for context, choice in json.loads((folder / f"{task}.json").read_text())] for task in QUESTIONS
    }
    for pairs in items.values():
        score(pairs[:8])  # what happens only once
    for line in sys.stdin:
        pairs = items[line.strip()]
        start = time.process_time()
        sums = score(pairs)
        print(json.dumps({"seconds": time.process_time() - start, "sums": sums}), flush=True)


Score = Callable[[Sequence[Pair]], list[float]]


def ours(folder: Path, contender: str) -> Score:
    """Return our engine's scoring."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from pipeline import generate
    from pipeline.algorithms.evaluate import LmEvalConfig
    from pipeline.evaluation.answers import AnswerLog
    from pipeline.evaluation.lm_eval_model import EnginesLM
    from tests.evaluation.likelihood_data import recipe
    from tests.evaluation.lm_eval_tasks import OneEngine
    from tests.generate.tiny import load

    kwargs = {"kv_cache_memory_bytes": ENGINE["kv_cache_memory_bytes"], **({"block_size": 32} if "32" in contender else {})}
    settings = recipe(folder / "model", "vllm", LONGEST, max_num_seqs=ENGINE["max_num_seqs"], vllm_kwargs=kwargs)
    engine = generate.build(settings.policy, 1, 0, 0)
    load(engine, load_file(folder / "model" / "model.safetensors").items(), 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def score(pairs: Sequence[Pair]) -> list[float]:
        with tempfile.TemporaryDirectory() as name:  # of the answers, so that nothing is kept
            answers: Any = AnswerLog(Path(name), "lm_eval")
            engines: Any = OneEngine(engine)
            return _theirs(EnginesLM(settings, LmEvalConfig(), tokenizer, engines, answers))(pairs)

    return score


def hugging_face(folder: Path) -> Score:
    """Return the scoring of lm-evaluation-harness's hf model."""
    from lm_eval.models.huggingface import HFLM

    return _theirs(HFLM(str(folder / "model"), device="cpu", dtype="float32", batch_size=HF_BATCH, max_length=LONGEST - 1))


def their_vllm(folder: Path) -> Score:
    """Return the scoring of lm-evaluation-harness's vllm model, with our engine's settings."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its CPU seconds are this process's
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    import torch
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"
    torch.compiler.set_stance("force_eager")
    from lm_eval.models.vllm_causallms import VLLM

    more: dict[str, Any] = {**ENGINE, "enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    return _theirs(VLLM(str(folder / "model"), dtype="float32", max_model_len=LONGEST, batch_size="auto", **more))


def _theirs(model: Any) -> Score:
    from lm_eval.api.instance import Instance

    def score(pairs: Sequence[Pair]) -> list[float]:
        asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
        return [value for value, _ in model.loglikelihood(asked, disable_tqdm=True)]

    return score


if __name__ == "__main__":
    contend(sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 1 else main()
