"""Check the key of encrypted checkpoints as far as this machine can: the file, or the program that prints the key."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator

from pipeline.config import Problem, Recipe, collected
from pipeline.files.stored_files import SECTION, obtain_key


def problems(recipe: Recipe, notes: list[str], on_nodes: bool) -> Iterator[Problem]:
    """Yield the problem of the file with the key, or of the command that prints it. The command is not started here.

    on_nodes: whether the ranks run on other nodes. notes: receives a key file that is missing here and may be on the nodes.
    """
    encryption = recipe.checkpointing.encryption
    if encryption.key_file is not None:
        if on_nodes and not os.path.exists(encryption.key_file):
            notes.append(f"not checked: {SECTION}.key_file, as {encryption.key_file} is not on this machine")
            return
        key_problems: list[Problem] = []
        with collected(key_problems):
            obtain_key(encryption.key_file, None)
        yield from key_problems
    elif encryption.key_command is not None and not on_nodes:
        yield from _command(encryption.key_command)


def _command(command: str) -> Iterator[Problem]:
    key = f"{SECTION}.key_command"
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem(key, "bad-format", f"got `{command}`: {error}; expected a program and its arguments, quoted for a shell")
        return
    if not words or shutil.which(words[0]) is None:
        yield Problem(key, "file-not-found", f"got `{command}`; expected a program that is installed here and prints the key")
