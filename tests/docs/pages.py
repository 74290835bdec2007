"""Reads the Markdown pages: code blocks, tables, commands, links; and puts a page's worked example into a copy of the code.

A block whose first line is `# PATH` is a file. A diff block with this first line changes a file; `@@` parts its hunks.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "containers", "launch", "pipeline", "recipes", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
OURS = [page for page in PAGES if page.relative_to(ROOT).parts[0] != ".github"]


class Block(NamedTuple):
    """A fenced code block."""

    language: str
    text: str

    @property
    def path(self) -> str | None:
        """The file that the block is or changes: its first line is `# PATH`."""
        found = re.match(r" ?# ([\w./]+\.\w+)\n", self.text)
        return found[1] if found else None

    @property
    def body(self) -> str:
        return self.text.partition("\n")[2]


def blocks(page: Path) -> list[Block]:
    """Return a page's code blocks, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def files(page: Path) -> list[str]:
    """Return the files of the project that a page's worked example adds or changes."""
    return list(dict.fromkeys(block.path for block in blocks(page) if block.path and "/" in block.path))


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def inline(page: Path) -> list[str]:
    """Return what stands between backticks in a page's prose."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command on a page: of lines in sh blocks, lines after `$ `, and text between backticks."""
    lines = []
    for block in blocks(page):
        text = block.text.replace("\\\n", " ").splitlines()
        lines += text if block.language == "sh" else [line[2:] for line in text if line.startswith("$ ")]
    for line in [*lines, *inline(page)]:
        if re.search(r"(^|&& )(\w+=\S+ )*(python|make|sbatch|\.venv/bin/python) ", line):
            words = shlex.split(line.rpartition("&& ")[2].replace("...", ""), comments=True)
            if any(word.startswith("launch/") or word in ("make", "-m") for word in words):
                yield words


def copy_of_the_code(folder: Path) -> Path:
    """Copy the code, the recipes and the tests into a folder, and return it."""
    for part in ("pipeline", "launch", "recipes", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def apply(page: Path, folder: Path) -> None:
    """Write the files of a page's worked example into a folder that has the code, and change those that it changes."""
    for block in blocks(page):
        if block.path is None:
            continue
        path = folder / block.path
        if block.language != "diff":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body)
            continue
        for hunk in re.split(r"^@@.*\n", block.body, flags=re.MULTILINE):
            old, new = (
                "".join(f"{line[1:]}\n" for line in hunk.splitlines() if line[:1] in kept) for kept in ((" ", "-"), (" ", "+"))
            )
            text = path.read_text()
            assert text.count(old) == 1, f"{block.path} does not have exactly once: {old}"
            path.write_text(text.replace(old, new))
