"""Encryption at rest, an extra: the key of a run, and files that are encrypted in chunks.

The core finds this package through the table in `pipeline/seams/extras.py`. Only `pipeline/files/stored_files.py` calls it.
"""

from pipeline.encryption.encrypted_file import EncryptedFile, Encryptor, decrypt
from pipeline.encryption.key import EncryptionKey, obtain
from pipeline.encryption.lines import decrypt_line, encrypt_line

encryptor, open_encrypted = Encryptor, EncryptedFile

__all__ = [
    "EncryptedFile",
    "EncryptionKey",
    "Encryptor",
    "decrypt",
    "decrypt_line",
    "encrypt_line",
    "encryptor",
    "obtain",
    "open_encrypted",
]
