"""Build the application: routes, tokens, limits, and errors as problems."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import anyio
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from launch.executors.slurm_client import SlurmError
from launch.serving.access import AccessError, Refused, Users
from launch.serving.authentication import Authentication
from launch.serving.body_limits import BodyLimit
from launch.serving.changes import AT_ONCE, REFUSED, changing
from launch.serving.error_body import malformed, problems_body
from launch.serving.exports import Exports
from launch.serving.pages import pages
from launch.serving.plans import ClientGone, Plans
from launch.serving.routes import reading
from launch.serving.run_cache import RunCache
from launch.serving.settings import ServiceConfig
from launch.serving.sweep_routes import Sweeps, sweeps
from pipeline.recipe.problems import HetstepError, Problem

API = "/api/v1"
STATUS = {
    "file-not-found": 404,
    "no-checkpoint": 404,
    "not-a-run": 404,
    "in-use": 409,
    "run-exists": 409,
    "not-ended": 409,
    "unreachable": 503,
    "timed-out": 504,
    "no-access": 403,
}
"""Code of a problem -> HTTP status; 422 for all other codes."""
DESCRIPTION = "Submit and watch runs. Send the header `Authorization: Bearer TOKEN`."


def application(config: ServiceConfig, refused: Refused = lambda user, request, why: None) -> FastAPI:
    """Return the service's application.

    refused: a function that is called for each request that is refused for lack of access.
    """
    app = FastAPI(
        title="Hetstep",
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
        lifespan=_lifespan,
    )
    app.state.users, app.state.runs, app.state.exports = Users(config), RunCache(config), Exports()
    app.state.sweeps, app.state.plans = Sweeps(app.state.runs), Plans(config.plan_s)
    app.state.threads = {kind: anyio.CapacityLimiter(count) for kind, count in AT_ONCE.items()}
    bearer = [Depends(HTTPBearer(auto_error=False))]  # for the OpenAPI page; `Authentication` checks the token
    app.include_router(reading, prefix=API, responses=REFUSED, dependencies=bearer)  # pyright: ignore[reportArgumentType]
    app.include_router(changing, prefix=API, dependencies=bearer)
    app.include_router(sweeps, prefix=API, dependencies=bearer)
    app.include_router(pages)

    @app.exception_handler(AccessError)
    def no_access(request: Request, error: AccessError) -> Response:
        if error.status in (401, 403):
            user = request.state.user if hasattr(request.state, "user") else None
            refused(user.name if user else "", f"{request.method} {request.url.path}", str(error))
        return _answer(error.status, [Problem("", error.code, str(error))])

    @app.exception_handler(HetstepError)
    def wrong(request: Request, error: HetstepError) -> Response:
        if "no-access" in error.codes:
            refused(request.state.user.name, f"{request.method} {request.url.path}", str(error))
        return _answer(STATUS.get(error.codes[0], 422) if error.codes else 422, error.problems)

    @app.exception_handler(ClientGone)
    def has_left(request: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody receives it

    @app.exception_handler(SlurmError)
    def no_slurm(request: Request, error: SlurmError) -> Response:
        return _answer(503, [Problem("", "unreachable", f"Slurm did not answer: {error}. Try again")])

    @app.exception_handler(RequestValidationError)
    def does_not_fit(request: Request, error: RequestValidationError) -> Response:
        return _answer(422, list(malformed(error.errors())))

    @app.exception_handler(Exception)
    def fault(request: Request, error: Exception) -> Response:
        message = f"got {type(error).__name__} in the service; expected an answer. The log of the service has the traceback"
        return _answer(500, [Problem("", "unreadable", message)])

    @app.exception_handler(HTTPException)
    def no_route(request: Request, error: HTTPException) -> Response:
        return _answer(error.status_code, [Problem("", "bad-format", str(error.detail))])

    app.add_middleware(Authentication, users=app.state.users, refused=refused)  # pyright: ignore[reportArgumentType]
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)  # pyright: ignore[reportArgumentType]  # outermost
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.plans.end()


def _answer(status: int, problems: Sequence[Problem]) -> Response:
    return Response(problems_body(problems), status, media_type="application/json")
