"""Write golden/lm_eval.json by lm-evaluation-harness's own code: its prompts and its scores of given answers.

    python -m tests.evaluation.lm_eval_golden

It needs lm_eval==0.4.13 with its extra `math`, whose antlr4-python3-runtime==4.11 must come before a newer one.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden/lm_eval.json"
SEED = 1234  # of its worked examples


def main() -> None:
    values = computed()
    assert "minerva_math" in values, "antlr4-python3-runtime is not of version 4.11"
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(values, indent=0, ensure_ascii=True) + "\n")


def computed() -> dict[str, Any]:
    """Return what lm_eval computes: without minerva_math where antlr4 is not of version 4.11, which its code insists on."""
    from tests.evaluation import sample_records

    with tempfile.TemporaryDirectory() as folder:
        sample_records.write(Path(folder))
        here = Path(folder)
        gsm8k = _task("gsm8k/gsm8k.yaml", here / "gsm8k/main", "train", "test")
        law = _task("mmlu_pro/mmlu_pro_law.yaml", here / "mmlu_pro", "test", "validation")
        for split in ("test", "dev"):  # lm_eval reads the subset of one subject
            path = here / f"mmlu/all/{split}.jsonl"
            path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if "anatomy" in line))
        anatomy = _task("mmlu/generative/mmlu_anatomy.yaml", here / "mmlu/all", "test", "dev")
        return {
            "gsm8k": {
                "prompts": _prompts(gsm8k, 5),
                "turns": _prompts(gsm8k, 5, chat=True, as_turns=True),
                "in_one_turn": _prompts(gsm8k, 2, chat=True, as_turns=False),
                "scores": [
                    [expected, text, *_scores(gsm8k, {"question": "?", "answer": f"So.\n#### {expected}"}, text)]
                    for expected, text in gsm8k_answers()
                ],
            },
            **({"minerva_math": _minerva_math(here)} if version("antlr4-python3-runtime").startswith("4.11") else {}),
            "mmlu_pro": {"prompts": _prompts(law, 5)},
            "mmlu": {"prompts": _prompts(anatomy, 5)},
        }


def _minerva_math(folder: Path) -> dict[str, Any]:
    task = _task("minerva_math/minerva_math_algebra.yaml", folder / "minerva_math/algebra", "test")
    return {
        "prompts": _prompts(task, 4),
        "scores": [[expected, text, *_minerva(expected, text)] for expected, text in minerva_answers()],
        "normalized": {text: _normalized(text) for text in FINAL_ANSWERS},
    }


def _task(file: str, folder: Path, *splits: str) -> Any:
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / file)
    files = {split: str(folder / f"{split}.jsonl") for split in splits}
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    if "train" not in splits:
        config.pop("training_split", None)
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(SEED)
    return task


def _prompts(task: Any, examples: int, chat: bool = False, as_turns: bool = False) -> list[Any]:
    """Return the prompt of each question, as messages in JSON with a chat template."""
    task.set_fewshot_seed(SEED)
    given: dict[str, Any] = {"apply_chat_template": True, "fewshot_as_multiturn": as_turns, "chat_template": _messages}
    return [task.fewshot_context(document, examples, **(given if chat else {})) for document in task.test_docs()]


def _messages(messages: list[dict], add_generation_prompt: bool) -> Any:
    return messages


def _scores(task: Any, document: dict, text: str) -> Iterator[float]:
    """Yield exact_match after each filter, in the order of the task."""
    for ensemble in task._filters:
        found: Any = [[text]]
        for make in ensemble.filters:
            found = make().apply(found, [document])
        yield float(task.process_results(document, [next(iter(found))])["exact_match"])


def _minerva(expected: str, text: str) -> tuple[float, float]:
    from lm_eval.tasks.minerva_math import utils

    solution = f"It is $\\boxed{{{expected}}}$."
    found = utils.process_results({"solution": solution, "answer": utils.normalize_final_answer(expected)}, [text])
    return float(found["exact_match"]), float(found["math_verify"])


def _normalized(text: str) -> str:
    from lm_eval.tasks.minerva_math import utils

    return utils.normalize_final_answer(text)


def gsm8k_answers() -> list[tuple[str, str]]:
    """Return (expected, text) of answers made by hand, and of random ones with the characters that the rules read."""
    from tests.evaluation.test_rules import GSM8K

    draws = random.Random(0)
    pieces = ["#### ", "####", " ", "\n", "$", ",", ".", "-", "72", "7", "1,080", "18.00", "so", "Answer: ", "#### 72", "72."]
    made = ["".join(draws.choices(pieces, k=draws.randint(1, 8))) for _ in range(150)]
    return [(case[0], case[1]) for case in GSM8K] + [(draws.choice(["72", "1,080", "7", "18", "-7"]), text) for text in made]


def minerva_answers() -> list[tuple[str, str]]:
    """Return (expected, text) of answers made by hand."""
    from tests.evaluation.test_rules import MATH, MINERVA

    return [(case[0], case[1]) for case in (*MINERVA, *MATH)]


FINAL_ANSWERS = (
    *("$24$", "24", "x = 24", "24 dollars", "\\$24", "\\boxed{24}", "24\\text{ cm}", "$1,000$", "1,000,000", "0,1", "-1,000"),
    *("\\frac12", "\\frac1{2}", "\\dfrac{1}{2}", "\\frac{1}{2}", "\\sqrt2", "\\sqrt{2}", "\\sqrt[3]8", "\\sqrt[3]{8}"),
    *("\\left( 3, \\frac{\\pi}{2} \\right)", "90^\\circ", "90^{\\circ}", "2\\pi cm", "2 \\pi \\text{ cm}^2", "\\text{Evelyn}"),
    *("10\\%", "x^2 + 2x + 1", "(1, 2)", "[2,5)", "\\{1,2\\}", "1 \\text{ and } 2", "\\mbox{odd}", "12 students", "an apple"),
    *("a square", "3 square feet", "3ft", "left", "\\ldots", "1, 2, \\dots", "7th", "7\\mathrm{th}", "\\overline{AB}", '"odd"'),
    *("\\textbf{(B)}", "$a$ and $b$", ".5", "5.$", "", " ", "x \\in [0,1]", "y=2x+3", "11\\text{:}30", "8 hours", "p.m."),
)

if __name__ == "__main__":
    main()
