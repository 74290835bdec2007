"""A service with a team of users, for tests."""

from pathlib import Path

from launch.serving.access import digest
from launch.serving.settings import ServiceConfig, UserConfig

TOKENS = {name: f"{name}-{'x' * 30}" for name in ("vera", "sam", "sue", "ada")}
ROLES = {"vera": "viewer", "sam": "submitter", "sue": "submitter", "ada": "admin"}


def settings(root: Path, **values) -> ServiceConfig:
    users = {name: UserConfig(digest(TOKENS[name]), role) for name, role in ROLES.items()}
    return ServiceConfig(root=str(root), users=users, **{"writable": True, "cache_s": 0.0, **values})


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[name]}"}
