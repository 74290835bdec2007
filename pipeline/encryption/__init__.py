"""Encryption at rest: the key of a run, and files that are encrypted in chunks.

Only bytes come in here: `pipeline/files/digests.py` writes files, `pipeline/config/checkpointing.py` has the keys of the
recipe.
"""

from pipeline.encryption.encrypted_file import EncryptedFile, Encryptor, decrypt, encrypt, is_encrypted, read_bytes
from pipeline.encryption.key import EncryptionKey, obtain
from pipeline.encryption.lines import decrypt_line, encrypt_line

__all__ = [
    "EncryptedFile",
    "EncryptionKey",
    "Encryptor",
    "decrypt",
    "decrypt_line",
    "encrypt",
    "encrypt_line",
    "is_encrypted",
    "obtain",
    "read_bytes",
]
