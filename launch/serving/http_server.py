"""Serve over HTTP with uvicorn, until a signal."""

from __future__ import annotations

import logging
from pathlib import Path

import uvicorn

from launch.serving.app import application
from launch.serving.connections import MAX_CONNECTIONS, bounded
from launch.serving.refusals import RefusalLog
from launch.serving.settings import ServiceConfig

IDLE_S = 10
END_S = 10
"""Seconds that current requests have to end after SIGTERM."""


def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT. config: the settings, as `settings.load` returns them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    uvicorn.run(
        application(config, RefusalLog(Path(config.root)).record),
        host=config.host,
        port=config.port,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        http=bounded(),
        ws="none",
        limit_concurrency=MAX_CONNECTIONS + 1,  # `bounded` keeps to it by closing silent connections
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=END_S,
        server_header=False,
        log_config=None,
    )
