"""The page: what its server refuses, what it starts and shows."""
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Page:
    """page.py in a process of its own, and a client that knows its token."""

    def __init__(self, folder, *words):
        self.process = subprocess.Popen([sys.executable, str(ROOT / "page.py"), "--port=0", *words], cwd=folder, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.url = self.process.stdout.readline().split()[1]
        self.port, self.token = re.search(r":(\d+)/\?token=(.+)", self.url).groups()
        self.port = int(self.port)

    def ask(self, path, body=None, token=True, method=None, **headers):
        """(status, headers, text) of one request; header names with _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        headers |= {"Cookie": f"llamac_{self.port}={self.token}"} if token else {}
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        answer = connection.getresponse()
        found = answer.status, answer.headers, answer.read().decode()
        connection.close()
        return found

    def get(self, path, body=None):
        status, _, text = self.ask(path, body)
        assert status == 200, text
        return json.loads(text)

    def raw(self, data, wait=3.0):
        """What the server answers to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            with contextlib.suppress(OSError):
                s.sendall(data)
            found = b""
            with contextlib.suppress(OSError):
                while piece := s.recv(65536):
                    found += piece
        return found

    def end(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=20)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    found = Page(tmp_path_factory.mktemp("page"))
    yield found
    found.end()


def test_the_address_gives_a_cookie_once_and_nothing_else_opens_the_page(page):
    status, headers, text = page.ask(f"/?token={page.token}", token=False)
    cookie = headers["Set-Cookie"]
    assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and page.token not in text
    assert page.ask("/", token=False, Cookie=cookie.split(";")[0])[0] == 200
    assert page.ask("/", token=False, Authorization=f"Bearer {page.token}")[0] == 200
    policy = page.ask("/")[1]["Content-Security-Policy"]
    assert "script-src 'self';" in policy and "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def attacks(page):
    """[(name, bytes)] of requests that must not be answered with 200."""
    host, good = f"Host: 127.0.0.1:{page.port}", f"Cookie: llamac_{page.port}={page.token}"
    bad = page.token[:-1] + ("a" if page.token[-1] != "a" else "b")

    def get(path="/app.js", *lines, method="GET", first=None, rest=b""):
        return "\r\n".join([first or f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + rest

    yield "no token", get("/", host)
    yield "wrong token", get(f"/?token={bad}", host)
    yield "empty token", get("/?token=", host)
    yield "part of a token", get(f"/?token={page.token[:-1]}", host)
    yield "token twice", get(f"/?token={page.token}&token=x", host)
    yield "token where it does not open", get(f"/app.js?token={page.token}", host)
    yield "wrong cookie", get("/", host, f"Cookie: llamac_{page.port}={bad}")
    yield "cookie of another port", get("/", host, f"Cookie: llamac_1={page.token}")
    yield "odd cookie", get("/", host, "Cookie: \x00=;;;=\xff")
    yield "bearer wrong", get("/", host, f"Authorization: Bearer {bad}")
    yield "basic", get("/", host, f"Authorization: Basic {page.token}")
    yield "token not ASCII", get("/?token=%C3%A9%FF", host)
    for name in ("evil.example", "evil.example:80", f"127.0.0.1.evil.example:{page.port}", "localhost.evil.example", "10.0.0.1",
                 "[::ffff:10.0.0.1]", "127.0.0.1:99999", "127.0.0.1@evil.example", "", "[", "localhost\t.evil.example"):
        yield f"Host {name!r}", get("/", f"Host: {name}", good)
    yield "no Host", get("/", good)
    yield "Host twice", get("/", host, "Host: evil.example", good)
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port}", "http://127.0.0.1:1", "http://localhost",
                   f"http://127.0.0.1:{page.port}.evil.example", ""):
        yield f"Origin {origin!r}", get("/", host, good, f"Origin: {origin}")
    for site in ("cross-site", "same-site", "other"):
        yield f"Sec-Fetch-Site {site}", get("/app.js", host, good, f"Sec-Fetch-Site: {site}")
    for path in ("/../page.py", "/..%2fpage.py", "/%2e%2e/page.py", "//etc/passwd", "/page/../../etc/passwd", "/etc/passwd",
                 "/static/../server.py", "/server.py", "/app.js/", "/app.js%00", "/./app.js", "/%61pp.js", "/app.js;x", "\\app.js",
                 "http://evil.example/etc/passwd", "file:///etc/passwd", "/" + "a" * 5000, "/~/.netrc", "/.env", "*"):
        yield f"path {path[:40]}", get(path, host, good)
    yield "other method", get("/", host, good, method="PUT")
    yield "CONNECT", get("evil.example:443", host, good, method="CONNECT")
    yield "POST where there is only GET", get("/app.js", host, good, "Content-Length: 0", method="POST")
    yield "100 MB", get("/", host, good, f"Content-Length: {100 << 20}", method="POST", rest=b"x" * 70000)
    yield "negative length", get("/", host, good, "Content-Length: -1", method="POST")
    yield "odd length", get("/", host, good, "Content-Length: ٣", method="POST")
    yield "two lengths", get("/", host, good, "Content-Length: 0", "Content-Length: 5", method="POST", rest=b"GET /")
    yield "chunks", get("/", host, good, "Transfer-Encoding: chunked", method="POST", rest=b"5\r\nhello\r\n0\r\n\r\n")
    yield "a long header", get("/", host, good, "X: " + "y" * 70000)
    yield "many headers", get("/", host, good, *(f"X{n}: y" for n in range(200)))
    yield "a long line", get(first="GET /" + "a" * 70000 + " HTTP/1.1")
    yield "no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"
    yield "HTTP/3.0", get(first="GET / HTTP/3.0")
    yield "no version", b"GET /\r\n\r\n"


def test_attacks_end_in_a_refusal_and_the_server_lives(page):
    found = list(attacks(page))
    assert len(found) >= 60
    for name, data in found:
        answer = page.raw(data)
        assert not re.match(rb"HTTP/1\.1 2", answer), (name, answer[:300])
        assert page.token.encode() not in answer and b"Traceback" not in answer, name
    assert page.ask("/")[0] == 200 and page.process.poll() is None


def test_slow_and_many_connections_do_not_keep_the_page_from_its_user(page):
    slow = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(150)]
    for connection in slow:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET / HTTP/1.1\r\n")
    since = time.monotonic()
    assert page.ask("/")[0] == 200 and time.monotonic() - since < 2
    assert not Path("/proc").exists() or threads(page) <= 110
    for connection in slow:
        connection.close()


def threads(page):
    return len(os.listdir(f"/proc/{page.process.pid}/task"))
