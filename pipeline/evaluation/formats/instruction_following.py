"""google/IFEval: prompts with instructions that a program can verify. Scored by `env.NAME.kind=ifeval`."""

from __future__ import annotations

import json

from typing_extensions import override

from pipeline.evaluation.questions import Format, Question, Record


class IFEvalPrompts(Format):
    """Turns records of google/IFEval into questions. The environment gets the instructions and their arguments."""

    columns = ("key", "prompt", "instruction_id_list", "kwargs")

    @override
    def question(self, record: Record, index: int) -> Question:
        names, arguments = record["instruction_id_list"], record["kwargs"]
        if not names or len(names) != len(arguments):
            raise ValueError(f"got {len(names)} instructions and {len(arguments)} kwargs; expected equal numbers, at least one")
        answer = json.dumps({"instruction_id_list": list(names), "kwargs": list(arguments)})
        return Question(id=str(record["key"]), prompt=record["prompt"], task={"answer": answer})
