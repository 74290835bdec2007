"""A server on this machine for what calls an endpoint: the test answers each POST."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, Any], tuple | None]
"""(the request, its body's JSON) -> (status, body, *headers); None where it has answered by itself."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Yield the address; each request has a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reply = answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if reply is None:
                return
            status, body, *headers = reply
            try:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except BrokenPipeError:  # the client has not waited
                pass

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
