"""Write launch/TROUBLESHOOTING.md from the codes of problems: python -m launch.terminal.troubleshooting."""

from __future__ import annotations

from pathlib import Path

from pipeline.recipe.problem_codes import CODES, GROUPS

PAGE = Path(__file__).parents[1] / "TROUBLESHOOTING.md"
HEAD = """\
# Error codes

`python -m launch.terminal.troubleshooting` writes this page from `pipeline/recipe/problem_codes.py`; do not edit it.

An error of a command has the form `KEY: got X; expected Y. Try Z. [CODE]`. An error of a single value begins with
`FILE:LINE: `, the place that sets the key; for other keys, `show=true` prints that place. All problems of a recipe are
printed at once, before anything is submitted, and the exit status is 2.
`python launch/submit.py help=CODE` prints an entry of this page.

For a run that started and then failed, see [When a run fails](OPERATIONS.md#when-a-run-fails).
"""


def explain(code: str) -> str:
    """Return cause and cure of a code as lines of text."""
    return f"{code}\n    cause: {CODES[code].cause}\n    cure:  {CODES[code].cure}"


def markdown() -> str:
    """Return launch/TROUBLESHOOTING.md."""
    lines = [HEAD]
    for title, codes in GROUPS.items():
        lines += [f"## {title}", "", "| code | cause | cure |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {code.cause} | {code.cure} |" for name, code in sorted(codes.items())] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(markdown())
