"""TRL's published commands, in a clone of https://github.com/huggingface/trl: those of its documentation and its scripts."""

from __future__ import annotations

import ast
import atexit
import re
import shutil
import tempfile
from pathlib import Path

from launch.recipes.trl.reading_trl import starts
from launch.recipes.trl.trl_defaults import TRAINERS
from tests.foreign.verl_scripts import Published

START = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*(?:accelerate launch|python|torchrun|trl) .*", re.MULTILINE)
CONFIGURATION = re.compile(r"```yaml\n# (\w+\.yaml)\n(.*?)```", re.DOTALL)
NOT_TEXT = ("vlm", "VL", "vision", "llava", "SmolVLM")


def published(root: Path) -> list[Published]:
    """Return the commands that start a trainer that Hetstep has, for text, each as a script, in the order of their files."""
    found = []
    files = [*root.glob("docs/source/**/*.md"), *root.glob("examples/scripts/*.py"), *root.glob("trl/scripts/*.py")]
    for path in sorted(files):
        folder = Path(tempfile.mkdtemp(prefix="trl_commands_"))
        atexit.register(shutil.rmtree, folder)
        for number, command in enumerate(commands(path)):
            for name, text in CONFIGURATION.findall(path.read_text()):  # of which a page has several with one name
                if f"--config {name}" in command and not (folder / name).exists():
                    (folder / name).write_text(text)
            script = folder / f"{path.stem}_{number}.sh"
            script.write_text(command + "\n")
            found.append(Published(f"{path.relative_to(root)}:{number}", script))
    return found


def commands(path: Path) -> list[str]:
    """Return the commands of a page, or of a script's docstring, that start a trainer of text that Hetstep has."""
    text = path.read_text()
    if path.suffix == ".py":
        heads = [ast.get_docstring(ast.parse(text)) or "", *re.findall(r'^"""\n(.*?)^"""', text, re.DOTALL | re.MULTILINE)]
        heads += ["\n".join(line[2:] for line in text.splitlines() if line.startswith("# "))]
        blocks = [head for head in heads if head]
    else:
        blocks = re.findall(r"```(?:bash|shell|sh)\n(.*?)```", text, re.DOTALL)
    joined = [re.sub(r"\\\n\s*|(?<=\S) {4,}", " ", block) for block in blocks]
    lines = [match[0].strip() for block in joined for match in START.finditer(block)]
    return [line for line in dict.fromkeys(" ".join(line.split()) for line in lines) if _trains_text(line)]


def _trains_text(line: str) -> bool:
    command = starts(line.split())
    named = "--dataset_name" in line or "--config " in line
    return command is not None and command[1] in TRAINERS and named and not any(word in line for word in NOT_TEXT)
