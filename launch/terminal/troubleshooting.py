"""Write launch/TROUBLESHOOTING.md from the codes of problems: python -m launch.terminal.troubleshooting."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pipeline.recipe.problem_codes import CODES, GROUPS

WIDTH = 128
PAGE = Path(__file__).parents[1] / "TROUBLESHOOTING.md"
HEAD = """\
# Error codes

`python -m launch.terminal.troubleshooting` writes this page from `pipeline/recipe/problem_codes.py`; do not edit it.

An error of a command has the form `KEY: got X; expected Y. Try Z. [CODE]`, after `FILE:LINE: ` where one place sets the value.
All problems are printed at once, before anything is submitted, with exit status 2. `python launch/submit.py help=CODE` prints
the cause and the cure below.

For a run that started and then failed, see [When a run fails](OPERATIONS.md#when-a-run-fails).
"""


def explain(codes: str) -> str:
    """Return lines with the cause and the remedy of each problem code. codes: separated by commas."""
    return "\n".join(f"{code}\n    cause: {CODES[code].cause}\n    cure:  {CODES[code].cure}" for code in codes.split(","))


def markdown() -> str:
    """Return the text of launch/TROUBLESHOOTING.md."""
    lines = [HEAD]
    for title, codes in GROUPS.items():
        lines += [f"## {title}", ""]
        for name, code in sorted(codes.items()):
            entry = f"- `{name}`: {code.cause} {code.cure}"
            lines += textwrap.wrap(entry, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(markdown())
