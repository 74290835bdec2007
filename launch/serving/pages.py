"""The web pages: a form for the token, the list of runs, and each run's report."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

from launch.drawing.html import Html, render, tag
from launch.pages.document import PLOTLY
from launch.runs import status_text
from launch.serving.access import COOKIE, AccessError
from launch.serving.routes import runs, sender

COOKIE_S = 12 * 3600
SWAGGER = ("swagger-ui-bundle.js", "swagger-ui.css")
STYLE = Path(__file__).parents[1] / "drawing/page.css"
POLICY = "default-src 'none'; base-uri 'none'; form-action 'self'; style-src 'unsafe-inline'"

pages = APIRouter(include_in_schema=False)


def page(template: str, **values: object) -> HTMLResponse:
    """Return a page without scripts, from a template of this folder."""
    text = render(f"serving/{template}", style=Html(STYLE.read_text(encoding="utf-8")), **values)
    return HTMLResponse(text, headers={"Content-Security-Policy": POLICY})


@pages.get("/login")
def login() -> HTMLResponse:
    """Return the page with the form for the token."""
    return page("login.html.j2")


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
    address = request.app.url_path_for
    return page(
        "runs.html.j2",
        user=sender(request).name,
        header=("run", "owner", *status_text.HEADER[:-1]),
        runs=[
            (tag("a", line["id"], href=f"/runs/{line['id']}/report"), line["owner"], *status_text.row(line)[:-1])
            for line in runs(request).lines()
        ],
        sweeps=[
            (tag("a", sweep.id, href=address("sweep_report", sweep_id=sweep.id)), sweep.owner, sweep.state, sweep.summary)
            for sweep in request.app.state.sweeps.lines()
        ],
    )


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
        raise AccessError(404, "not-installed", f"the package {package} is not installed. Try pip install '.[serve]'")
    return FileResponse(path, headers={"Cache-Control": "max-age=3600"})
