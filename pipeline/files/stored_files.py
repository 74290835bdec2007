"""Write the files of a run and compute their SHA-256, and read them. With a key, the extra `encryption` encrypts them.

A file is encrypted as a whole or line by line. Its first bytes tell whether it is, so plain files are read without the extra.
This file handles only bytes; `pipeline/config/checkpointing.py` has the recipe's keys for encryption.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.seams import extras

SECTION = "checkpointing.encryption"
MAGIC = b"HETSTEP\x01"
"""The first bytes of an encrypted file."""
LINE_PREFIX = b'{"encrypted": '
"""The first bytes of an encrypted line."""
PIECE = 8 << 20
"""Bytes that are hashed in one thread while they are written in another."""


class FileKey(Protocol):
    """The key with which files are encrypted."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that name the key."""
        ...

    def mac(self, message: bytes) -> str:
        """Return a message authentication code of a message under this key, in hex."""
        ...


Key = TypeVar("Key", bound=FileKey)


class OpenFile(Protocol):
    """An open encrypted file, of which any part can be read."""

    def read(self, offset: int, length: int) -> bytearray:
        """Return `length` decrypted bytes from `offset` on. Raises RecipeError if they are damaged."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def _encryption(key: str, got: object) -> Any:
    """Return the extra `encryption`. Raises RecipeError, with the recipe's `key` and its value `got`, if it is missing."""
    return extras.load("encryption", key, got)


# ---- keys ---------------------------------------------------------------------------------------------------------------


def obtain_key(key_file: str | None, key_command: str | None) -> FileKey | None:
    """Return the key that a file holds or a command prints; None without either. Raises RecipeError without the key."""
    name, given = ("key_file", key_file) if key_file is not None else ("key_command", key_command)
    return None if given is None else _encryption(f"{SECTION}.{name}", given).obtain(key_file, key_command)


def fitting(key: Key | None, fingerprint: str, what: object) -> Key:
    """Return `key` if it has `fingerprint`. Otherwise raise RecipeError with both fingerprints. what: the encrypted thing."""
    if key is None:
        message = (
            f"{what} is encrypted: got no key; expected the key with fingerprint {fingerprint}. Try {SECTION}.key_file or"
            " key_command, or HETSTEP_KEY_FILE=FILE for a command"
        )
        raise RecipeError(Problem(SECTION, "wrong-key", message))
    if key.fingerprint != fingerprint:
        message = f"{what} is encrypted: got the key {key.fingerprint}; expected the key with fingerprint {fingerprint}"
        raise RecipeError(Problem(SECTION, "wrong-key", message))
    return key


# ---- read ---------------------------------------------------------------------------------------------------------------


def is_encrypted(content: bytes) -> bool:
    """Return whether a file is encrypted. content: the file's content, or its first bytes."""
    return content.startswith(MAGIC)


def read_bytes(path: Path, key: FileKey | None = None) -> bytes:
    """Return a file's content, decrypted if it is encrypted. Raises OSError, and RecipeError for a wrong key or damage."""
    with user_files.open_file(path) as file:
        content = file.read()
    return _encryption(SECTION, f"{path}, which is encrypted").decrypt(content, key, path) if is_encrypted(content) else content


def open_encrypted(path: Path, key: FileKey | None) -> OpenFile:
    """Open an encrypted file. Raises OSError, and RecipeError for a missing or wrong key, or a damaged file."""
    return _encryption(SECTION, f"{path}, which is encrypted").open_encrypted(path, key)


def decrypt_line(line: bytes, key: Callable[[], FileKey | None], path: Path, at: int) -> bytes:
    """Return the decrypted line at byte `at` of the file `path`. Return a plain line unchanged.

    key: a function that returns the key, called for an encrypted line. Raises RecipeError if the key is missing or wrong, or if
    the line was changed.
    """
    if not line.startswith(LINE_PREFIX):
        return line
    return _encryption(SECTION, f"{path}, which is encrypted").decrypt_line(line, key, path, at)


# ---- write --------------------------------------------------------------------------------------------------------------


def encrypt(data: bytes, key: FileKey, name: str) -> bytes:
    """Return `data` as the content of an encrypted file with this name."""
    encryptor = _encryption(SECTION, key).encryptor(key, name)
    return b"".join([encryptor.header, *encryptor.update(data), encryptor.finish()])


def encrypt_line(line: bytes, key: FileKey, name: str, at: int) -> bytes:
    """Return a line, which ends in a newline, as an encrypted line of the file `name` that begins at byte `at`."""
    return _encryption(SECTION, key).encrypt_line(line, key, name, at)


class DigestWriter:
    """Writes a file, encrypted with a key, and computes the SHA-256 of what is written. Use it as a context manager."""

    def __init__(self, path: Path, key: FileKey | None = None):
        """Open the file at `path`, replacing its content. key: None to write plain bytes. Raises OSError."""
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._hash = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1)
        self._encryptor = _encryption(SECTION, key).encryptor(key, path.name) if key else None
        if self._encryptor:
            self._put(self._encryptor.header)

    def __enter__(self) -> DigestWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError."""
        if self._encryptor is None:
            self._put(data)
            return
        for chunk in self._encryptor.update(data):
            self._put(chunk)

    def finish(self) -> str:
        """Wait until all bytes are on disk, and return the file's digest in hex. Raises OSError."""
        if self._encryptor:
            self._put(self._encryptor.finish())
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE):
            unwritten = piece = view[at : at + PIECE]
            hashed = self._hashing.submit(self._hash.update, piece)
            try:
                while unwritten:  # a full disk takes a part and fails only at the next write
                    unwritten = unwritten[self._file.write(unwritten) :]
            finally:
                hashed.result()


def write_bytes(path: Path, data: bytes, key: FileKey | None = None) -> str:
    """Write a file, wait until it is on disk, and return its digest. Raises OSError."""
    with DigestWriter(path, key) as file:
        file.write(data)
        return file.finish()
