"""
A small HTTP server for one person: routes to functions, a token, and nothing for anyone else.

A route is "METHOD /path": handler(request), which returns a Response, a dict or list (sent as JSON), or an iterator of
server-sent events: dicts (sent as JSON), strings (as they are), None (nothing new: finds out whether the reader has gone).
A handler raises ValueError for what the user did wrong, which he reads in {"error": ...}. Handlers know nothing of sockets.
"""
import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

MOST_CONNECTIONS = 100  # that have shown the token, and as many that have not
MOST_BYTES = 1 << 20  # of a request's body
PATIENCE = 10         # seconds for a request to arrive; for a piece of the answer to be taken
MAX_ERROR = 1000      # characters of what an error quotes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
                               "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
                               "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
}
# the page anew, without the token in its address
ENTRY = '<!doctype html><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0; url=/">'


@dataclass
class Request:
    method: str
    path: str
    query: dict
    body: bytes = b""
    gone: Callable = lambda: False  # whether the reader has gone meanwhile

    def json(self):
        """The body, a JSON object."""
        return json_object(self.body, "the body")


@dataclass
class Response:
    content: object              # bytes, str, or what JSON has
    status: int = 200
    kind: str = "application/json"
    headers: dict = field(default_factory=dict)

    def data(self):
        if isinstance(self.content, bytes):
            return self.content
        return (self.content if isinstance(self.content, str) else json.dumps(self.content)).encode("utf-8", "replace")


def json_object(text, what):
    """Return the object that a JSON text holds. ValueError: it holds something else, or nests too deeply."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{what} is not JSON ({e})") from e
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")
    return found


def error(status, words):
    return Response({"error": words}, status)


def as_file(name):
    """The header that makes a browser keep an answer as a file."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def is_loopback(host):
    """Whether nobody else reaches an address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_ours(host, loopback):
    """
    Whether a Host header names this machine. A page of another site that has its own name resolve to this machine (DNS
    rebinding) sends that name; it can't send an address.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        urlsplit(f"//{host}").port  # noqa: B018 (raises where it is none)
    except ValueError:
        return False
    if is_loopback(name):
        return True
    with contextlib.suppress(ValueError):
        return not loopback and bool(ipaddress.ip_address(name))
    return not loopback and name == socket.gethostname().lower()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host, port, routes):
        """Listen there. Raises OSError when it can't."""
        self.routes, self.token, self.lock = routes, secrets.token_urlsafe(24), threading.Lock()
        self.open = {}  # socket: [when its time is over, None: never; whether it has shown the token; whether it streams]
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.loopback = is_loopback(host)
        super().__init__((host, port), Handler)
        self.cookie = f"llamac_{self.server_address[1]}"  # cookies of one machine's ports share their names
        threading.Thread(target=self.end_slow, daemon=True).start()

    def server_bind(self):
        """Without the base class's look-up of this machine's name, which can take seconds."""
        self.allow_reuse_address and self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def url(self):
        host = self.server_address[0]
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/?token={self.token}"

    def process_request(self, connection, address):
        """Take a connection. Those that have not shown the token take no place of those that have."""
        with self.lock:
            self.open[connection] = [time.monotonic() + PATIENCE, False, False]
            self.make_room([other for other, (_, known, _) in self.open.items() if not known])
        return super().process_request(connection, address)

    def make_room(self, connections):
        """Close the oldest of too many connections."""
        if len(connections) > MOST_CONNECTIONS:
            self.cut(connections[0])
            del self.open[connections[0]]

    @staticmethod
    def cut(connection):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def arrived(self, connection, known):
        """Note that the whole request is here. Of too many connections with the token, the oldest stream ends first."""
        with self.lock:
            if connection in self.open:
                self.open[connection] = [None, known, False]
                ours = [other for other, (_, known, _) in self.open.items() if known and other is not connection]
                self.make_room(sorted(ours, key=lambda other: not self.open[other][2]))

    def streams(self, connection):
        """Note that the answer on this connection is a stream of events."""
        with self.lock:
            if connection in self.open:
                self.open[connection][2] = True

    def shutdown_request(self, connection):
        with self.lock:
            self.open.pop(connection, None)
        super().shutdown_request(connection)

    def end_slow(self):
        while True:
            time.sleep(1)
            now = time.monotonic()
            with self.lock:
                for connection, (end, _, _) in self.open.items():
                    if end is not None and now > end:
                        self.cut(connection)

    def handle_error(self, connection, address):
        if not isinstance(sys.exc_info()[1], OSError):  # a reader who has gone is none of ours
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    """One request; then the connection ends."""
    protocol_version, timeout, server_version, sys_version = "HTTP/1.1", PATIENCE, "llamac", ""

    def log_message(self, *args):
        pass  # the token stands in addresses

    def send_error(self, code, message=None, explain=None):
        self.reply(error(code, message or "refused"))

    def do_GET(self):
        host, wrong = self.headers.get("Host", ""), None
        try:
            parts = urlsplit(self.path)
            query = dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100))
        except ValueError:
            return self.reply(error(400, "not an address"))
        entering = (self.command, parts.path) == ("GET", "/")
        if len(self.headers.get_all("Host", [])) != 1 or not is_ours(host, self.server.loopback):
            wrong = error(403, "this is not the name of this machine")
        elif self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            wrong = error(403, "asked for by another site")
        elif not entering and self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            wrong = error(403, "asked for by another site")
        elif entering and self.is_token(query.get("token", "")):
            cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            wrong = Response(ENTRY, kind="text/html", headers={"Set-Cookie": cookie})
        elif not self.knows_token():
            wrong = Response("Open the address that page.py printed: it ends in a token.\n", 403, "text/plain")
        if wrong:
            return self.reply(wrong)
        body = self.body()
        if body is not None:
            self.server.arrived(self.connection, True)
            self.answer(Request(self.command, parts.path, query, body, self.gone))

    do_POST = do_GET

    def is_token(self, text):
        return hmac.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def knows_token(self):
        """By the cookie, or, as programs do, in a header Authorization."""
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(bearer.strip()):
            return True
        with contextlib.suppress(CookieError):
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
            return bool(found) and self.is_token(found.value)
        return False

    def body(self):
        """The request's body; None where it was refused."""
        lengths = self.headers.get_all("Content-Length", ["0"])
        if "Transfer-Encoding" in self.headers or len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            return self.reply(error(411, "a body needs its Content-Length, once"))
        if len(lengths[0]) > len(str(MOST_BYTES)) or int(lengths[0]) > MOST_BYTES:
            return self.reply(error(413, f"a body has at most {MOST_BYTES:,} bytes"))
        found = self.rfile.read(int(lengths[0]))
        return found if len(found) == int(lengths[0]) else self.reply(error(400, "the body was cut short"))

    def gone(self):
        """Whether the reader has closed the connection."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(PATIENCE)

    def answer(self, request):
        routes = self.server.routes
        handler = routes.get(f"{request.method} {request.path}")
        if not handler:
            known = any(route.endswith(f" {request.path}") for route in routes)
            return self.reply(error(405, "not this way") if known else error(404, "there is nothing"))
        try:
            found = handler(request)
        except ValueError as e:
            found = error(400, " ".join(str(e).split())[:MAX_ERROR])
        except RecursionError:  # of JSON that can just be parsed
            found = error(400, "what was sent is nested too deeply")
        except SystemExit:  # configurator.fail
            found = error(500, "the terminal in which page.py runs says what is wrong")
        except Exception as e:
            traceback.print_exc()
            found = error(500, f"{type(e).__name__}: {e}")
        if isinstance(found, (dict, list)):
            found = Response(found)
        return self.reply(found) if isinstance(found, Response) else self.stream(found)

    def reply(self, response):
        data = response.data()
        self.head(response.status, response.kind, response.headers | {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def head(self, status, kind, more):
        self.send_response(status)
        text = kind.startswith("text/") or kind == "application/json"
        kind += "; charset=utf-8" * text
        for name, value in {"Content-Type": kind, "Connection": "close", **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def stream(self, events):
        """Send events until there are no more or the reader goes."""
        with contextlib.closing(events) if hasattr(events, "close") else contextlib.nullcontext():
            self.server.streams(self.connection)
            self.head(200, "text/event-stream", {})
            for event in events:
                text = event if isinstance(event, str) else json.dumps(event)
                self.wfile.write(b": \n\n" if event is None else f"data: {text}\n\n".encode())


KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}


def file(path, **headers):
    """The route of a file."""
    return lambda request: Response(path.read_bytes(), kind=KINDS[path.suffix], headers=headers)


def files(folder):
    """Routes of the page's own files, a fixed list: no path is ever made of what a client sends."""
    return {f"GET /{'' if path.name == 'index.html' else path.name}": file(path)
            for path in sorted(folder.iterdir()) if path.suffix in KINDS and path.name != "saved.html"}
