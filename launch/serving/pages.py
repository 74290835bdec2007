"""The web pages: a form for the token, the list of runs, and each run's report."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from launch.drawing.html import Html, table, tag
from launch.pages.document import PLOTLY
from launch.runs import status_text
from launch.serving.access import COOKIE, AccessError
from launch.serving.routes import runs, sender

COOKIE_S = 12 * 3600
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
STYLE = Path(__file__).parents[1] / "drawing/page.css"
POLICY = "default-src 'none'; base-uri 'none'; form-action 'self'; style-src 'unsafe-inline'"

pages = APIRouter(include_in_schema=False)


def page(title: str, *content: object) -> HTMLResponse:
    """Return a page without scripts."""
    style = Html(f"<style>{STYLE.read_text(encoding='utf-8')}</style>")
    head = tag("head", Html('<meta charset="utf-8">'), tag("title", title), style)
    body = tag("body", tag("main", tag("h1", title), *content))
    return HTMLResponse(f"<!doctype html>{tag('html', head, body, lang='en')}", headers={"Content-Security-Policy": POLICY})


@pages.get("/login")
def login() -> HTMLResponse:
    """Return the page with the form for the token."""
    field = Html('<input type="password" name="token" autocomplete="current-password" required>')
    button = tag("button", "Sign in", type="submit")
    return page("Sign in", tag("form", tag("label", "Token ", field), button, method="post", action="/login"))


@pages.post("/login")
async def signed_in(request: Request) -> Response:
    """Keep the token in a cookie that scripts and other sites' pages cannot use, and show the runs."""
    fields = parse_qs((await request.body()).decode("ascii", "replace"), max_num_fields=2)
    token = fields.get("token", [""])[0]
    if request.app.state.users.user(token) is None:
        raise AccessError(401, "no-access", "got no valid token; expected the token of a user of the service")
    answer = RedirectResponse("/", status_code=303)
    secure = request.app.state.users.config.tls_certificate is not None
    answer.set_cookie(COOKIE, token, max_age=COOKIE_S, httponly=True, samesite="strict", secure=secure)
    return answer


@pages.post("/logout")
def logout() -> Response:
    """Forget the token."""
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE)
    return answer


@pages.get("/")
def overview(request: Request) -> HTMLResponse:
    """Return the lists of runs and of sweeps, each with a link to its report."""
    header = ("run", "owner", *status_text.HEADER[:-1])
    user = sender(request)
    form = tag("form", tag("button", f"Sign out {user.name}", type="submit"), method="post", action="/logout")
    found = table(header, [_row(line) for line in runs(request).lines()])
    return page("Runs", form, found, *_sweeps(request), tag("p", tag("a", "API", href="/docs")))


def _sweeps(request: Request) -> Iterator[Html]:
    """Yield the list of sweeps, each with a link to its report, if there are any."""
    if found := request.app.state.sweeps.lines():
        addresses = [request.app.url_path_for("sweep_report", sweep_id=each.id) for each in found]
        rows = [
            (tag("a", each.id, href=address), each.owner, each.state, each.summary)
            for each, address in zip(found, addresses, strict=True)
        ]
        yield tag("h2", "Sweeps")
        yield table(("sweep", "owner", "state", "outcome"), rows)


def _row(line: dict[str, Any]) -> Sequence[object]:
    link = tag("a", line["id"], href=f"/runs/{line['id']}/report")
    return (link, line["owner"], *status_text.row(line)[:-1])


@pages.get("/runs/{run_id}/report")
def report(request: Request, run_id: str) -> HTMLResponse:
    """Return the report of a run, as `python launch/report.py` writes it."""
    return HTMLResponse(runs(request).report(run_id))


@pages.get(f"/runs/{{run_id}}/{PLOTLY}")
def plotly(run_id: str) -> FileResponse:
    """Return Plotly's script, which reports load."""
    return _packaged("plotly", f"package_data/{PLOTLY}")


@pages.get("/docs")
def docs(request: Request) -> HTMLResponse:
    """Return the page on which the requests are described and can be tried."""
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Hetstep",
        swagger_js_url=f"/swagger/{SWAGGER[0]}",
        swagger_css_url=f"/swagger/{SWAGGER[1]}",
        swagger_favicon_url="data:,",
    )


@pages.get("/swagger/{name}")
def swagger(name: str) -> FileResponse:
    """Return a file of Swagger UI. The package fastapi-offline holds these files, so the page needs no internet."""
    if name not in SWAGGER:
        raise AccessError(404, "file-not-found", f"got another file; expected one of {', '.join(SWAGGER)}")
    return _packaged("fastapi_offline", f"static/{name}")


def _packaged(package: str, file: str) -> FileResponse:
    found = importlib.util.find_spec(package)
    path = Path(found.origin).parent / file if found and found.origin else None
    if path is None or not path.is_file():
        raise AccessError(404, "not-installed", f"the package {package} is not installed. Try pip install 'hetstep[serve]'")
    return FileResponse(path, headers={"Cache-Control": "max-age=3600"})
