"""What a server does for those who have no business with it: little, for a short time, and it tells them nothing."""

import contextlib
import socket
import time

import pytest
from served import PICTURE, asking, image_export, png, serving

LINE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return image_export(tmp_path_factory.mktemp("limits") / "digits")


@pytest.fixture(scope="module")
def brief(digits):
    """A server that waits for a second."""
    with serving(digits, "--timeout", "1") as server:
        yield server


def connected(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def rest(opened):
    """What comes until the server closes the connection."""
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: opened.recv(1 << 16), b""))
    return b""


@pytest.mark.parametrize(
    "head, endless, status",
    [
        (LINE + b"X: ", b"a", b"431"),
        (LINE, b"X: y\r\n", b"431"),
        (b"GET /", b"a", b"431"),
        (b"", b"\r\n", b"431"),
        (CHUNKED + b"0\r\n", b"X: y\r\n", b""),
        (CHUNKED + b"1;", b"a", b""),
        (CHUNKED, b"0", b""),
        (b"", LINE + b"\r\n", b"200"),
        (LINE + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"a", b"200"),
    ],
    ids=["header", "headers", "line", "lines", "trailers", "extension", "size", "pipelined", "upgrade"],
)
def test_what_has_no_end_is_ended(brief, head, endless, status):
    with connected(brief) as opened:
        sent, piece = len(head), endless * (MEGABYTE // len(endless))
        with contextlib.suppress(ConnectionError):
            opened.sendall(head)
            while sent < 40 * MEGABYTE:
                opened.sendall(piece)
                sent += len(piece)
        assert sent < 20 * MEGABYTE  # what the buffers of the system hold
        assert rest(opened)[:12] in (b"", b"HTTP/1.1 " + status)  # what is lost with the connection is lost
    assert asking(brief, png(PICTURE)).status_code == 200


def test_headers_of_the_largest_size_are_read_and_larger_ones_are_not(brief):
    head = LINE + b"X: \r\n\r\n"
    for extra, status in ((0, b"200"), (1, b"431")):
        with connected(brief) as opened:
            opened.sendall(LINE + b"X: " + b"a" * ((64 << 10) - len(head) + extra) + b"\r\n\r\n")
            assert opened.recv(100).split()[1] == status
    chunks = b"".join(b"1\r\na\r\n" for _ in range(50000))  # what announces them is no header
    with connected(brief) as opened:
        opened.sendall(CHUNKED + chunks + b"0\r\n\r\n")
        assert opened.recv(100).split()[1] == b"422"


def test_who_says_nothing_or_not_enough_or_reads_nothing_is_left(brief):
    with contextlib.ExitStack() as stack:
        silent, half, slow, idle, deaf = (stack.enter_context(connected(brief)) for _ in range(5))
        half.sendall(LINE)
        idle.sendall(LINE + b"\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(8):
                deaf.sendall(b"GET /static-offline-docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in LINE:  # a byte in time is not a request in time
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert (rest(silent), rest(half)[:12], rest(idle)[:12]) == (b"", b"HTTP/1.1 408", b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in rest(slow) or time.monotonic() - began < 2.5
        time.sleep(1)
        assert len(rest(deaf)) < 8 * MEGABYTE
        assert time.monotonic() - began < 6


def test_a_crowd_that_says_nothing_keeps_nobody_out(brief):
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(brief)) for _ in range(560)]
        assert asking(brief, png(PICTURE)).status_code == 200
        crowd[0].settimeout(0.1)
        assert rest(crowd[0]) == b""  # the oldest have made room


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST:1234"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "evil.example:8000"}, 421),
        ({"host": "localhost.evil.example"}, 421),
        ({"host": "localhost@evil.example"}, 421),
        ({"host": "[::1].evil.example"}, 421),
        ({"host": "0.0.0.0"}, 421),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, 200),
        ({"host": "localhost:80", "origin": "http://localhost:81"}, 403),
        ({"host": "localhost", "origin": "https://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "http://["}, 403),
        ({"host": "localhost", "origin": "https://public.example", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "localhost", "origin": "https://public.example", "sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_a_page_of_another_site_is_told_nothing(brief, headers, status):
    for path in ("/info", "/", "/docs", "/openapi.json", "/health", "/metrics", "/static-offline-docs/swagger-ui.css"):
        assert brief.get(path, headers=headers).status_code == status, path
    asked = {"content": png(PICTURE), "headers": {"content-type": "image/png"} | headers}
    assert brief.post(**asked).status_code == status


def test_a_server_for_others_has_any_name(digits):
    with serving(digits, "--host", "0.0.0.0") as server:
        assert server.get("/info", headers={"host": "model.example"}).status_code == 200


def test_every_answer_has_the_headers_of_a_page_that_loads_nothing_from_elsewhere(brief):
    for path in ("/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/info", "/nowhere", "/static-offline-docs/x"):
        headers = brief.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'"), path
        assert headers["x-content-type-options"] == "nosniff"


def test_without_the_key_nothing_is_told_of_the_model(digits):
    with serving(digits, "--api-key", "k3y") as server:
        known = {"authorization": "Bearer k3y"}
        told = server.get("/info", headers=known)
        name, digest = told.json()["title"].split("@")
        assert "k3y" not in told.text + server.get("/metrics", headers=known).text
        for path in ("/", "/docs", "/openapi.json", "/health", "/ready", "/info", "/metrics", "/predict", "/nowhere"):
            found = server.get(path)
            assert digest not in found.text and f"{name}@" not in found.text and f": {name}" not in found.text, path
        schema = server.get("/openapi.json").json()
        answer = schema["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]
        assert answer["schema"] and "example" not in answer
