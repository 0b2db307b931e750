"""HTTP server on the loopback for remote rewards: keeps its requests and how many are under way."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Status, text or JSON, and perhaps more headers.
Reply = tuple[int, object] | tuple[int, object, dict[str, str]]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, handler: "type[Handler]") -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.lock = threading.Lock()
        self.bodies: list[dict] = []
        self.heads: list[tuple[str, str | None]] = []  # path and Authorization
        self.peers: set = set()
        self.now = self.most = 0
        self.released = threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Sends what `answer` returns for a body and its number from 1; None drops the connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def answer(self, body: dict[str, Any], number: int) -> Reply | None:
        raise NotImplementedError

    def do_POST(self) -> None:
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.bodies.append(body)
            server.heads.append((self.path, self.headers.get("Authorization")))
            server.peers.add(self.client_address)
            server.now += 1
            server.most = max(server.most, server.now)
            number = len(server.bodies)
        reply = self.answer(body, number)
        with server.lock:
            server.now -= 1
        try:
            if reply is None:
                self.close_connection = True
            else:
                self.send(*reply)
        except OSError:  # the client went away
            self.close_connection = True

    def send(self, code: int, content: object, more: dict[str, str] | None = None) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        for name, value in ({"Location": "/elsewhere"} | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(server: Server) -> Iterator[None]:
    """Serve requests in a thread during the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield
        server.released.set()
        server.shutdown()
        thread.join()
