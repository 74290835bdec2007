"""Read and check the YAML file of the service."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config import Problem, RecipeError, config_tree, refuse, schema_validation
from pipeline.recipe.values import Float, Positive, Text

Role = Literal["viewer", "submitter", "admin"]
"""viewer: reads every run. submitter: also submits runs, and changes their own. admin: changes every run."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The form of a user's name, which names a folder below the root."""
HASH = re.compile(r"[0-9a-f]{64}")


@dataclass
class UserConfig:
    """A user of the service."""

    token_sha256: Text = schema_validation.MISSING  # SHA-256 of the token, in hexadecimal digits
    role: Role = "viewer"


@dataclass
class ServiceConfig:
    """The service's settings."""

    root: Text = schema_validation.MISSING  # the folder whose runs the service shows; what USER submits is in ROOT/USER
    users: dict[str, UserConfig] = field(default_factory=dict)
    writable: bool = False  # false: all requests that submit or change something are refused
    host: Text = "127.0.0.1"  # the address to listen on
    port: Annotated[int, Field(ge=0, le=65535)] = 8765  # 0: any free one
    tls_certificate: Text | None = None  # PEM files for HTTPS
    tls_key: Text | None = None
    plain_http: bool = False  # true: allow HTTP on an address that other machines reach
    folders: list[Text] = field(default_factory=list)  # whose models and data requests may name, besides root and recipes/
    plan_s: Annotated[Float, Field(ge=1)] = 120.0  # seconds that a plan may take
    max_body_bytes: Positive = 65536  # of a request
    cache_s: Annotated[Float, Field(ge=0)] = 5.0  # seconds for which the state of a live run is kept


def load(path: Path) -> ServiceConfig:
    """Return the settings in a YAML file. Raises RecipeError with all problems."""
    tree = config_tree.load_with_parents(path)
    key_problems = list(schema_validation.unknown_keys(ServiceConfig, tree))
    for problem in key_problems:
        tree.drop(problem.key)
    config, wrong = schema_validation.validate_tree(ServiceConfig, schema_validation.with_defaults(ServiceConfig, tree))
    refuse([*key_problems, *wrong])
    assert isinstance(config, ServiceConfig), "without problems there is a value"
    refuse(problems(config))
    return config


def problems(config: ServiceConfig) -> Iterator[Problem]:
    """Yield the problems of settings that fit the schema."""
    if not Path(config.root).is_dir():
        yield Problem("root", "file-not-found", f"got {config.root}, which is not a folder; expected the folder of the runs")
    for folder in config.folders:
        if not Path(folder).is_absolute() or not Path(folder).is_dir():
            yield Problem("folders", "file-not-found", f"got {folder}; expected the absolute path of a folder")
    if not config.users:
        yield Problem("users", "missing-value", "got none; expected at least one. Try python launch/serve.py new_token=true")
    hashes: dict[str, str] = {}
    for name, user in config.users.items():
        key = f"users.{name}"
        if not NAME.fullmatch(name):
            expected = "expected at most 64 letters, digits, '.', '_' and '-', since it names a folder"
            yield Problem(key, "bad-format", f"got '{name}'; {expected}")
        if not HASH.fullmatch(user.token_sha256):
            expected = "expected 64 lower-case hexadecimal digits. Try python launch/serve.py new_token=true"
            yield Problem(f"{key}.token_sha256", "bad-format", f"got {len(user.token_sha256)} characters; {expected}")
        elif (holder := hashes.setdefault(user.token_sha256, name)) != name:
            yield Problem(
                f"{key}.token_sha256", "given-twice", f"got the token of {holder}; expected another one for each user"
            )
    if (config.tls_certificate is None) != (config.tls_key is None):
        yield Problem(
            "tls_certificate", "contradiction", "got only one of tls_certificate and tls_key; expected both or neither"
        )
    for key in ("tls_certificate", "tls_key"):
        if (file := getattr(config, key)) is not None and not Path(file).is_file():
            yield Problem(key, "file-not-found", f"got {file}, which is not a file; expected a PEM file")
    yield from _unusable_pair(config)
    if not _is_loopback(config.host) and config.tls_certificate is None and not config.plain_http:
        message = f"got {config.host} without tls_certificate, so that tokens are sent unencrypted; expected 127.0.0.1 or HTTPS"
        yield Problem("host", "contradiction", f"{message}. Try plain_http: true only behind a proxy that has HTTPS")


def _unusable_pair(config: ServiceConfig) -> Iterator[Problem]:
    """Yield a problem if the certificate and its key cannot be used together."""
    certificate, key = config.tls_certificate, config.tls_key
    if certificate is None or key is None or not (Path(certificate).is_file() and Path(key).is_file()):
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")  # no prompt
    except OSError as error:  # an SSLError too
        expected = "expected a certificate and its key, in PEM and without a password"
        yield Problem("tls_certificate", "unreadable", f"got {certificate} and {key}; {expected}: {error}")


def refuse_unusable_address(config: ServiceConfig) -> None:
    """Raise RecipeError if nothing can listen on the host and port now."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        socket.create_server((config.host, config.port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"got {config.port}, on which another process listens; expected a free port. Try another, or 0 for any"
            raise RecipeError(Problem("port", "in-use", message)) from None
        key, code = ("port", "permission-denied") if error.errno == errno.EACCES else ("host", "unreachable")
        value = getattr(config, key)
        raise RecipeError(
            Problem(key, code, f"got {value}, on which the service cannot listen: {error.strerror}. Try another value")
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
