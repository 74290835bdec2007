"""The key of a run: 32 random bytes from a file or a command, which no file of a run holds.

All other keys are derived from it with HKDF-SHA256 (RFC 5869) or HMAC-SHA256 (RFC 2104), each for one purpose. The fingerprint
is one of them, so it does not lead back to the key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import NoReturn

from pipeline.files.stored_files import SECTION
from pipeline.recipe import secrets, user_files
from pipeline.recipe.problems import Problem, RecipeError

BYTES = 32
FINGERPRINT_BYTES = 8
FORM = f"{BYTES} random bytes as {2 * BYTES} hex digits or in base64"
MAKE = "(umask 077; openssl rand -hex 32 > KEY_FILE)"
STDERR_CHARACTERS = 300
TIMEOUT_S = 60.0  # of a command


def ciphers():
    """Return the module of the ciphers. Raises RecipeError if the package `cryptography` is not installed."""
    try:
        from pipeline.encryption import ciphers as module  # an optional package
    except ModuleNotFoundError:
        message = "needs the package cryptography, which is not installed. Try `pip install '.[encryption]'`"
        raise RecipeError(Problem(SECTION, "not-installed", message)) from None
    return module


class EncryptionKey:
    """The secret key of a run. Its text form shows only the fingerprint, and it cannot be pickled."""

    def __init__(self, secret: bytes):
        """Hold a secret of 32 bytes."""
        assert len(secret) == BYTES
        self._secret = secret

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the key: the beginning of an HMAC under it."""
        return self.mac(b"hetstep: fingerprint of a key")[: 2 * FINGERPRINT_BYTES]

    def mac(self, message: bytes) -> str:
        """Return HMAC-SHA256 of a message under this key, in hex."""
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def derived(self, salt: bytes, purpose: bytes) -> bytes:
        """Derive a key of 32 bytes for one purpose. Raises RecipeError if `cryptography` is not installed."""
        return ciphers().derive(self._secret, salt, purpose)

    def __repr__(self) -> str:
        return f"EncryptionKey({self.fingerprint})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an encryption key cannot be pickled, so that it is neither sent nor stored")


def obtain(key_file: str | None, key_command: str | None) -> EncryptionKey | None:
    """Return the key that a file holds or a command prints; None without either. Raises RecipeError, never with the key in it.

    key_command: split into words as by a shell, and started without a shell. It is ended after TIMEOUT_S.
    """
    if key_file is not None:
        return _parse(f"{SECTION}.key_file", key_file, _read(Path(key_file)))
    if key_command is not None:
        return _parse(f"{SECTION}.key_command", key_command, _run(key_command))
    return None


def _error(name: str, code: str, message: str) -> RecipeError:
    return RecipeError(Problem(f"{SECTION}.{name}", code, message))


def _read(path: Path) -> bytes:
    try:
        with user_files.open_file(path) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                message = f"got {path}, which others may open (mode {mode:04o}); expected 0600 or 0400. Try chmod 600 {path}"
                raise _error("key_file", "permission-denied", message)
            return file.read(1 << 12)
    except OSError as error:
        code = "file-not-found" if isinstance(error, FileNotFoundError) else "permission-denied"
        message = f"got {path}: {error.strerror}; expected a file that every node can read. Try {MAKE}"
        raise _error("key_file", code, message) from None


def _run(command: str) -> bytes:
    try:
        words = shlex.split(command)
        if not words:
            raise ValueError("no program is named")
        ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        message = f"got no key from `{command}` within {TIMEOUT_S:g} s; expected one. Is its server reachable?"
        raise _error("key_command", "unreachable", message) from None
    except (OSError, ValueError) as error:
        message = f"got `{command}`, which cannot be started here: {error}; expected a program that prints the key"
        raise _error("key_command", "file-not-found", message) from None
    if ended.returncode:
        said = secrets.redact(ended.stderr.decode(errors="replace").strip()[-STDERR_CHARACTERS:])
        message = (
            f"got exit status {ended.returncode} from `{command}`; expected 0 and the key. Its stderr: {said or 'nothing'}"
        )
        raise _error("key_command", "unreachable", message)
    return ended.stdout


def _parse(key: str, source: str, content: bytes) -> EncryptionKey:
    text = content.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{%d}" % (2 * BYTES), text):
        return EncryptionKey(bytes.fromhex(text.decode()))
    try:
        secret = base64.b64decode(text, validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != BYTES:
        message = f"got {len(text)} characters from {source}; expected {FORM}. Try {MAKE}"
        raise RecipeError(Problem(key, "bad-format", message))
    return EncryptionKey(secret)
