"""Encrypt the lines of a growing JSON lines file one by one, each by AES-256-GCM with its own random nonce.

An encrypted line is `{"encrypted": FINGERPRINT, "line": BASE64}`. The file's name and the line's position are authenticated, so
a line that was changed, moved or put into a file of another name is noticed. Three changes are not noticed: lines missing at
the end, plain lines, and lines from the same byte of a file of the same name in another folder.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.encryption.key import EncryptionKey, ciphers
from pipeline.files.stored_files import fitting
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE = 12


def encrypt_line(line: bytes, key: EncryptionKey, name: str, at: int) -> bytes:
    """Encrypt a line, which ends in a newline, for byte `at` of the file `name`."""
    nonce = os.urandom(NONCE)
    sealed = base64.b64encode(nonce + _cipher(key, name).encrypt(nonce, line, str(at).encode())).decode()
    return json.dumps({"encrypted": key.fingerprint, "line": sealed}).encode() + b"\n"


def decrypt_line(line: bytes, key: Callable[[], EncryptionKey | None], path: Path, at: int) -> bytes:
    """Decrypt the line at byte `at` of the file `path`, which `encrypt_line` encrypted.

    key: a function that returns the key. Raises RecipeError if the key is missing or wrong, or if the line was changed.
    """
    try:
        record = json.loads(line)
        sealed, fingerprint = base64.b64decode(record["line"], validate=True), record["encrypted"]
        cipher = _cipher(fitting(key(), fingerprint, path), path.name)
        return cipher.decrypt(sealed[:NONCE], sealed[NONCE:], str(at).encode())
    except RecipeError:
        raise
    except (ciphers().InvalidTag, ValueError, KeyError, TypeError):
        message = f"{path}: got a changed or moved line at byte {at}; expected the encrypted line that was written there"
        raise RecipeError(Problem("run", "damaged", message)) from None


def _cipher(key: EncryptionKey, name: str) -> AESGCM:
    derived = key.derived(b"", b"hetstep: lines of " + name.encode())
    return ciphers().AESGCM(derived)
