"""
A small HTTP server for one user: it maps routes to functions and refuses requests without a token.

Routes are {"METHOD /path": handler}. handler(request) returns one of:

- a Response;
- a dict or a list, which is sent as JSON;
- an iterator of server-sent events: a dict is sent as JSON, a str as it is, a list of these in one
  write, and None or an empty list as an empty comment; sending it fails if the client has closed
  the connection.

A handler raises ValueError for a user's mistake, and the server sends {"error": message}. Handlers
never touch a socket.
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

MAX_CONNECTIONS = 100  # max authenticated connections, and max unauthenticated ones
MAX_BODY = 1 << 20     # max bytes of a request's body
TIMEOUT = 10           # seconds within which a request must arrive; also the timeout of each send
MAX_ERROR = 1000       # max characters of an error message
HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Response to /?token=...: it loads / at once, so that the token leaves the address bar.
ENTRY = ('<!doctype html><link rel="icon" href="data:,">'
         '<meta http-equiv="refresh" content="0; url=/">')
MIME_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css",
              ".json": "application/json"}


@dataclass
class Request:
    method: str
    path: str
    query: dict
    body: bytes = b""
    gone: Callable = lambda: False  # returns whether the client has closed the connection

    def json(self):
        """Return the body, a JSON object. Raises ValueError."""
        return json_object(self.body, "the body")


@dataclass
class Response:
    content: object  # bytes, str, or a value to send as JSON
    status: int = 200
    kind: str = "application/json"
    headers: dict = field(default_factory=dict)

    def data(self):
        """Return the body in bytes."""
        if isinstance(self.content, bytes):
            return self.content
        text = self.content if isinstance(self.content, str) else json.dumps(self.content)
        return text.encode("utf-8", "replace")


@dataclass
class Connection:
    """The state of an open socket."""
    deadline: float | None  # time.monotonic() by which its request must arrive; None: arrived
    authenticated: bool = False
    streams: bool = False   # its response is a stream of events


def json_object(text, name):
    """
    Return the dict in a JSON text. Raises ValueError for any other value or deep nesting. name:
    what the text is, for error messages.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{name} is not JSON ({e})") from e
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    return found


def error(status, message):
    """Return the Response that reports an error."""
    return Response({"error": message}, status)


def as_download(name):
    """Return the header that makes a browser save a response as a file."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def is_loopback(host):
    """Return whether an address or host name is reachable only from this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def is_this_machine(host, loopback):
    """
    Return whether a Host header names this machine. loopback: the server listens only on loopback.

    This stops DNS rebinding: another site can let its own name resolve to this machine's address,
    but then the browser sends that name. It can't make the browser send an address.
    """
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018 (raises ValueError for a malformed port)
    except ValueError:
        return False
    name = parts.hostname or ""
    if loopback or is_loopback(name):
        return is_loopback(name)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name == socket.gethostname().lower()


class Server(ThreadingHTTPServer):
    """
    The server. It limits the number of connections and the time for a request to arrive, so that
    clients without the token can't lock the user out.
    """
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host, port, routes):
        """Listen on host and port. Raises OSError."""
        self.routes = routes
        self.token = secrets.token_urlsafe(24)
        self.lock = threading.Lock()
        self.connections = {}  # {socket: Connection}, the oldest first
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.loopback = is_loopback(host)
        super().__init__((host, port), Handler)
        # Browsers share cookies between the ports of a machine, so the cookie's name has the port.
        self.cookie = f"llamac_{self.server_address[1]}"
        threading.Thread(target=self.close_late, daemon=True).start()

    def server_bind(self):
        """Bind without the base class's look-up of this machine's name, which can take seconds."""
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def url(self):
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self.token}"

    def process_request(self, connection, address):
        """
        Accept a connection. If there are too many unauthenticated ones, close the oldest of them.
        """
        with self.lock:
            self.connections[connection] = Connection(time.monotonic() + TIMEOUT)
            self.make_room([s for s, c in self.connections.items() if not c.authenticated])
        super().process_request(connection, address)

    def make_room(self, sockets):
        """Close the first of these sockets if there are more than MAX_CONNECTIONS."""
        if len(sockets) > MAX_CONNECTIONS:
            self.close_now(sockets[0])
            del self.connections[sockets[0]]

    @staticmethod
    def close_now(connection):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def arrived(self, connection):
        """
        Note that an authenticated request is complete. If there are too many other authenticated
        connections, close the oldest stream, or without streams the oldest connection.
        """
        with self.lock:
            if connection in self.connections:
                self.connections[connection] = Connection(None, authenticated=True)
                others = [s for s, c in self.connections.items()
                          if c.authenticated and s is not connection]
                streams_first = sorted(others, key=lambda s: not self.connections[s].streams)
                self.make_room(streams_first)

    def begin_stream(self, connection):
        """Note that the response on this connection is a stream of events."""
        with self.lock:
            if connection in self.connections:
                self.connections[connection].streams = True

    def shutdown_request(self, connection):
        with self.lock:
            self.connections.pop(connection, None)
        super().shutdown_request(connection)

    def close_late(self):
        """Close connections whose requests do not arrive in time, in a separate thread."""
        while True:
            time.sleep(1)
            now = time.monotonic()
            with self.lock:
                for connection, known in self.connections.items():
                    if known.deadline is not None and now > known.deadline:
                        self.close_now(connection)

    def handle_error(self, connection, address):
        """Print the traceback of an exception, unless the connection has failed (OSError)."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    """Answers one request, and then closes the connection."""
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT
    disable_nagle_algorithm = True  # send an event before the client acknowledges the last one
    server_version = "llamac"
    sys_version = ""

    def log_message(self, *args):
        """Log nothing: the first request's address contains the token."""

    def send_error(self, code, message=None, explain=None):
        """Reply to a malformed request; called by the base class. explain: not used."""
        self.reply(error(code, message or "refused"))

    def do_GET(self):
        try:
            parts = urlsplit(self.path)
            pairs = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=100)
        except ValueError:
            return self.reply(error(400, "the address is malformed"))
        query = dict(pairs)
        early_response = self.admit(parts.path, query)
        if early_response:
            return self.reply(early_response)
        body = self.read_body()
        if body is not None:
            self.server.arrived(self.connection)
            self.answer(Request(self.command, parts.path, query, body, self.gone))

    do_POST = do_GET

    def admit(self, path, query):
        """
        Return the Response to a request that needs no handler: an error, or the page that sets the
        cookie. Return None for an authenticated request.
        """
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        site = self.headers.get("Sec-Fetch-Site", "none")
        entering = self.command == "GET" and path == "/"  # links from other sites may lead here
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_this_machine(host, self.server.loopback):
            return error(403, "the Host header does not name this machine")
        if origin != f"http://{host}" or not entering and site not in ("same-origin", "none"):
            return error(403, "the request comes from another site")
        if entering and self.is_token(query.get("token", "")):
            cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            return Response(ENTRY, kind="text/html", headers={"Set-Cookie": cookie})
        if not self.is_authenticated():
            message = "Open the address that page.py printed: it ends in a token.\n"
            return Response(message, 403, "text/plain")
        return None

    def is_token(self, text):
        return hmac.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def is_authenticated(self):
        """Return whether the request has the token: in an Authorization header or in the cookie."""
        kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.is_token(bearer.strip()):
            return True
        # SimpleCookie would stop at the cookie of another local program that it does not accept.
        cookies = [cookie.strip().partition("=")
                   for cookie in self.headers.get("Cookie", "").split(";")]
        return any(name == self.server.cookie and self.is_token(value)
                   for name, _, value in cookies)

    def read_body(self):
        """Return the request's body, or None (from reply) after sending an error."""
        lengths = self.headers.get_all("Content-Length", ["0"])
        length = lengths[0]
        is_number = length.isascii() and length.isdigit()
        if "Transfer-Encoding" in self.headers or len(lengths) > 1 or not is_number:
            return self.reply(error(411, "expected one Content-Length header"))
        # int() raises for thousands of digits, so the number of digits is checked first.
        if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
            return self.reply(error(413, f"expected a body of at most {MAX_BODY:,} bytes"))
        found = self.rfile.read(int(length))
        if len(found) < int(length):
            return self.reply(error(400, "the body is shorter than its Content-Length"))
        return found

    def gone(self):
        """Return whether the client has closed the connection."""
        self.connection.settimeout(0)
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:  # open, but nothing to read
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(TIMEOUT)

    def answer(self, request):
        """Send what the handler of the request's route returns, or an error without a route."""
        routes = self.server.routes
        handler = routes.get(f"{request.method} {request.path}")
        if handler:
            found = self.call(handler, request)
        elif any(route.endswith(f" {request.path}") for route in routes):
            found = error(405, f"{request.method} is not allowed here")
        else:
            found = error(404, "not found")
        if isinstance(found, (dict, list)):
            found = Response(found)
        return self.reply(found) if isinstance(found, Response) else self.stream(found)

    def call(self, handler, request):
        """Return what a handler returns, or a Response that reports its error."""
        try:
            return handler(request)
        except ValueError as e:
            return error(400, " ".join(str(e).split())[:MAX_ERROR])
        except RecursionError:  # the JSON could be parsed, but the handler recurses deeper
            return error(400, "the request is nested too deeply")
        except SystemExit:  # raised by configurator.fail, which has printed why
            return error(500, "failed; the terminal that runs page.py shows why")
        except Exception as e:
            traceback.print_exc()
            return error(500, f"{type(e).__name__}: {e}")

    def reply(self, response):
        data = response.data()
        length = {"Content-Length": str(len(data))}
        self.send_head(response.status, response.kind, response.headers | length)
        self.wfile.write(data)

    def send_head(self, status, kind, headers):
        """Send the status line and all headers. kind: the MIME type."""
        self.send_response(status)
        if kind.startswith("text/") or kind == "application/json":
            kind += "; charset=utf-8"
        headers = {"Content-Type": kind, "Connection": "close", **HEADERS, **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def stream(self, events):
        """Send events until they end or the client closes the connection."""
        self.server.begin_stream(self.connection)
        try:
            self.send_head(200, "text/event-stream", {})
            for event in events:
                texts = map(event_text, event if isinstance(event, list) else [event])
                self.wfile.write("".join(texts).encode() or b": \n\n")
        finally:
            if hasattr(events, "close"):  # a generator
                events.close()


def event_text(event):
    """Return an event in the format of server-sent events."""
    if event is None:
        return ": \n\n"
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


def file_route(path, **headers):
    """Return the handler that sends a file."""
    kind = MIME_TYPES[path.suffix]
    return lambda request: Response(path.read_bytes(), kind=kind, headers=headers)


def file_routes(folder):
    """Return routes of the page's own files, a fixed list: a client can't ask for another path."""
    # saved.html is compare.py's template.
    paths = [path for path in sorted(folder.iterdir())
             if path.suffix in MIME_TYPES and path.name != "saved.html"]
    return {f"GET /{path.name}".replace("/index.html", "/"): file_route(path) for path in paths}
