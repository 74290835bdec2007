"""Count the lines of Python by package: all, and those without blank lines, comments and docstrings.

python -m tests.lines [CHECKOUT]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
TREES = ("pipeline", "launch", "tests")


def code_lines(text: str) -> int:
    """Return how many lines hold code: neither blank, nor only a comment, nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                lines.difference_update(range(child.lineno, child.end_lineno + 1))
    return len(lines)


def main(root: Path) -> None:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tree in TREES:
        for path in (root / tree).rglob("*.py"):
            parts, text = path.relative_to(root).parts, path.read_text()
            for name in {tree, "/".join(parts[: 2 if len(parts) > 2 else 1])}:
                for i, number in enumerate((1, len(text.splitlines()), code_lines(text))):
                    found[name][i] += number
    print(f"{'package':32} {'files':>6} {'lines':>7} {'code':>7}")
    for name, numbers in sorted(found.items()):
        print(f"{name:32} {numbers[0]:6} {numbers[1]:7} {numbers[2]:7}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]))
