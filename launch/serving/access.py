"""Check tokens and roles, and decide who may change which run."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.serving.settings import Role, ServiceConfig

RANKS: dict[Role, int] = {"viewer": 0, "submitter": 1, "admin": 2}
COOKIE = "hetstep_token"
"""The cookie with a browser's token. It counts only for reading, so a page of another site cannot change anything."""
LONGEST_TOKEN = 200

Refused = Callable[[str, str, str], Any]
"""A function that is called for each refused request, with (user, or "" if unknown; the request; why)."""


class AccessError(Exception):
    """Raised for a request that its sender may not make."""

    def __init__(self, status: int, code: str, message: str):
        """Create the error of an HTTP status and of a problem with a code and a message."""
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class User:
    """The user who sent a request."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Return whether the user has a role or a higher one."""
        return RANKS[self.role] >= RANKS[role]


def new_token() -> tuple[str, str]:
    """Return a new token of 256 random bits, and its SHA-256 for the settings."""
    token = secrets.token_urlsafe(32)
    return token, digest(token)


def digest(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits. Random tokens need no slower hash."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Users:
    """Finds the users of the settings by their tokens, and checks what they may do."""

    def __init__(self, config: ServiceConfig):
        """Find users in these settings."""
        self.config = config

    def user(self, token: str) -> User | None:
        """Return the user of a token; None if no user has it.

        The time that this takes does not depend on the token's characters.
        """
        if not token or len(token) > LONGEST_TOKEN:
            return None
        given, found = digest(token), None
        for name, each in self.config.users.items():
            if hmac.compare_digest(given, each.token_sha256):
                found = User(name, each.role)
        return found

    def identified(self, authorization: str | None, cookie: str | None, method: str) -> User:
        """Return the user of a request, by its header Authorization; without one, for reading, by its cookie.

        Raises AccessError.
        """
        kind, _, token = (authorization or "").partition(" ")
        if authorization is not None:
            user = self.user(token.strip()) if kind.lower() == "bearer" else None
        else:
            user = self.user(cookie or "") if method in ("GET", "HEAD") else None
        if user is None:
            raise AccessError(401, "no-access", "got no valid token; expected the header Authorization: Bearer TOKEN")
        return user

    def check_role(self, user: User, role: Role, changes: bool) -> None:
        """Raise AccessError if the user's role is too low, or if the request changes something and the service only reads."""
        if not user.may(role):
            raise AccessError(403, "no-access", f"got the role {user.role}; expected {role}")
        if changes and not self.config.writable:
            message = "got a request that changes something; expected one that only reads. Try writable: true in the settings"
            raise AccessError(403, "no-access", message)

    def check_owner(self, user: User, owner: str) -> None:
        """Raise AccessError if a run is not of this user and the user is not an admin."""
        if user.name != owner and not user.may("admin"):
            whose = owner or "no user of the service"
            raise AccessError(403, "no-access", f"got a run of {whose}; expected your own run, or the role admin")
