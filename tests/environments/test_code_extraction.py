"""The program of an answer: in a chat's blocks, as a continuation, or in an open block."""

import pytest

from pipeline.environments.code_extraction import find_code

GIVEN = 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef f(x: int) -> int:\n    """ Add 1. """\n'
BEFORE = "import math\n\n\ndef helper(x):\n    return x\n\n\n"
F, G = "def f(x):\n    return x + 1", "def g(x):\n    return x"


def block(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}\n```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block(F), F),
        (f"Here:\n{block(F, '')}\nDone.", F),
        (f"{block(F, 'Python')}", F),
        (f"{block(F, 'py')}\n{block('f(1)')}", F),
        (f"{block(G)}\n{block(F)}", F),
        (f"{block(F)}\n{block(F + '0')}", F + "0"),
        (f"{block(F)}\n{block('pip install x', 'bash')}", F),
        (f"{block(G)}\n{block('print(1)')}", "print(1)"),
        ("1. First:\n   ```python\n   def f(x):\n       return x + 1\n   ```", F),
        (f"```python\n{F}", F),
        (F, F),
        (f"<think>{block('def f(x): return 0')}</think>{block(F)}", F),
        (f"{block(F)} Wait.</think> I give up.", None),
        (
            block("class Solution:\n    def f(self, x):\n        return x"),
            "class Solution:\n    def f(self, x):\n        return x",
        ),
        (block("f = lambda x: x + 1"), "f = lambda x: x + 1"),
        (block("async def f(x): ..."), "async def f(x): ..."),
        (block("{}", "json"), None),
        ("```python\n```", None),
        ("I do not know.", None),
        ("", None),
        ("f is a function", None),
        ("```", None),
        ("`def f(x): return 1`", None),
        (G, None),
    ],
)
def test_blocks(text: str, code: str | None):
    found = find_code(text, "blocks", "f")
    assert found is None if code is None else found is not None and found.strip() == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block(F), BEFORE + "\n" + F + "\n"),
        (block("    return x + 1"), GIVEN + "    return x + 1\n"),
        (block("return x + 1"), "return x + 1\n"),  # it is not a function's body
        (block("from __future__ import annotations\n" + F), "from __future__ import annotations\n" + F + "\n"),
        (block(BEFORE + F), BEFORE + "\n" + BEFORE + F + "\n"),
    ],
)
def test_blocks_that_complete_given_code(text: str, code: str):
    assert find_code(text, "blocks", "f", GIVEN) == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("    return x + 1\n", "    return x + 1\n"),
        ("    return x + 1\n```\nIt adds.\n```python\nf(1)\n```", "    return x + 1\n"),
        ("```", None),
        ("", None),
        (" \n", None),
        ("thoughts</think>    return 1", "    return 1"),
    ],
)
def test_continuations_and_open_blocks(text: str, code: str | None):
    assert find_code(text, "continuation", "f", GIVEN) == (None if code is None else GIVEN + code)
    assert find_code(text, "open_block", "f") == code


@pytest.mark.parametrize("text", ["```" * 20_000, "```python\n" * 20_000, "`" * 100_000, "def f(" * 20_000, "(" * 100_000])
def test_long_texts_are_searched_in_linear_time(text: str):
    find_code(text, "blocks", "f", GIVEN)
