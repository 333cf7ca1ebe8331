"""A model over HTTP: its answers are the model's own, and whatever is sent, the answer says what is wrong with it."""

import concurrent.futures
import contextlib
import json
import socket
import struct
import time
import zlib

import numpy as np
import pytest
from served import (
    LABELS,
    PICTURE,
    POISON,
    SLOWLY,
    as_text,
    asking,
    image_export,
    png,
    serving,
    slow_export,
    text_export,
)

from lockstep.inference.trained_model import open_predictor

HEADLINES = [
    "Oil prices rise",
    "Late goal wins the cup",
    "A patch for the browser " * 30,
    "\u5317\u4eac \U0001f680",
    "a",
]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory, minilm):
    return text_export(tmp_path_factory.mktemp("text") / "news", minilm)


@pytest.fixture(scope="module")
def texts(text_folder):
    with serving(text_folder, "--max-body-mb", "2") as server:
        yield server


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    with serving(image_export(tmp_path_factory.mktemp("image") / "digits")) as server:
        yield server


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory):
    return slow_export(tmp_path_factory.mktemp("slow") / "slow")


def near(found, expected):
    return np.allclose(list(found.values()), expected, atol=1e-5)


# ---- answers


@pytest.mark.core
def test_answers_are_the_models_own(texts, text_folder):
    predictor = open_predictor(text_folder)
    expected = predictor.scores(predictor.encode(HEADLINES))
    for text, row in zip(HEADLINES, expected, strict=True):
        found = texts.post(json={"text": text}).json()
        assert near(found["probabilities"], row)
        assert found["label"] == LABELS[row.argmax()]
        assert found["confidence"] == max(found["probabilities"].values())
        assert found["model"] == predictor.facts.title
    together = texts.post("/predict/batch", json={"texts": HEADLINES}).json()["predictions"]
    assert all(near(one["probabilities"], row) for one, row in zip(together, expected, strict=True))
    assert len({one["label"] for one in together}) > 1


@pytest.mark.core
def test_many_at_once_are_not_mixed_up(texts, text_folder):
    """Of all lengths, from many threads, so that they share batches."""
    predictor = open_predictor(text_folder)
    asked = [" ".join(f"word{(n * 7 + k) % 97}" for k in range(1 + n % 60)) for n in range(120)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda text: texts.post(json={"text": text}).json(), asked))
    expected = predictor.scores(predictor.encode(asked))
    assert all(near(one["probabilities"], row) for one, row in zip(found, expected, strict=True))


@pytest.mark.parametrize("form", ["json", "url", "png", "jpeg", "upload"])
def test_an_image_in_every_form(images, form):
    file = png(PICTURE, "JPEG" if form == "jpeg" else "PNG")
    sent = {
        "json": {"json": {"image": as_text(file)}},
        "url": {"json": {"image": "data:image/png;base64," + as_text(file)}},
        "png": {"content": file, "headers": {"content-type": "image/png"}},
        "jpeg": {"content": file, "headers": {"content-type": "image/jpeg; charset=binary"}},
        "upload": {"files": {"file": ("x.png", file)}},
    }
    found = images.post(**sent[form])
    assert found.status_code == 200, found.text
    same = images.post("/predict/batch", json={"images": [as_text(png(255 - PICTURE)), as_text(file)]}).json()
    assert near(found.json()["probabilities"], list(same["predictions"][1]["probabilities"].values()))
    assert found.json()["probabilities"] != same["predictions"][0]["probabilities"]


# ---- what is wrong

DEEP = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
WRONG_TEXTS = {
    "nothing": (b"", 422, "body"),
    "no json": (b"{'text': 'a'}", 422, "body"),
    "cut off": (b'{"text": "a', 422, "body"),
    "a list": (b'["a"]', 422, "body"),
    "another field": (b'{"txt": "a"}', 422, "text"),
    "many fields": (("{" + ",".join(f'"f{n}": 1' for n in range(5000)) + "}").encode(), 422, "body"),
    "one more field": (b'{"text": "a", "lang": "en"}', 422, "lang"),
    "a number": (b'{"text": 7}', 422, "text"),
    "null": (b'{"text": null}', 422, "text"),
    "empty": (b'{"text": ""}', 422, "text"),
    "half of a character": (b'{"text": "a\\ud800b"}', 422, "body"),
    "not utf-8": (b'{"text": "\xff\xfe"}', 422, "body"),
    "deep": (DEEP.encode(), 422, "body"),
    "not a number": (b'{"text": NaN}', 422, "text"),
    "too large": (b'{"text": "' + b"a" * (2 << 20) + b'"}', 413, None),
    "far too large": (b" " * (9 << 20), 413, None),
}


@pytest.mark.parametrize("body, status, field", WRONG_TEXTS.values(), ids=WRONG_TEXTS)
def test_a_wrong_text_is_told(texts, body, status, field):
    found = texts.post(content=body, headers={"content-type": "application/json"})
    assert found.status_code == status, found.text
    assert found.json()["error"]
    if field:
        assert field in [fault["field"] for fault in found.json()["detail"]]
    assert texts.post(json={"text": "and on it goes"}).status_code == 200


RIGHT_TEXTS = {
    "a megabyte": "wo rd " * 170_000,
    "zero": "a\0b",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "blank": " \n\t",
    "controls": "".join(map(chr, range(1, 32))),
}


@pytest.mark.parametrize("text", RIGHT_TEXTS.values(), ids=RIGHT_TEXTS)
def test_a_strange_text_is_a_text(texts, text):
    assert texts.post(json={"text": text}).json()["label"] in LABELS


def test_head_is_get_without_a_body(texts):
    for path, status in (("/health", 200), ("/predict", 405)):
        found = texts.client.head(path)
        assert (found.status_code, found.content) == (status, b"")


@pytest.mark.parametrize("asked", [{"texts": []}, {"texts": ["a"] * 257}, {"texts": ["a", 3]}, {"text": "a"}], ids=str)
def test_a_wrong_batch_is_told(texts, asked):
    found = texts.post("/predict/batch", json=asked)
    assert found.status_code == 422
    assert found.json()["detail"][0]["field"] in ("texts", "texts.1", "text")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side):
    """A few bytes that say they are a picture of side x side pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


WRONG_IMAGES = {
    "no image": (b"hello", "cannot be read as an image"),
    "nothing": (b"", "cannot be read as an image"),
    "cut off": (png(np.random.default_rng(0).integers(0, 255, (50, 50)))[:300], "cannot be read as an image"),
    "a bomb": (bomb(9_000), "9000 x 9000 pixels, more than 64,000,000"),
    "a larger bomb": (bomb(60_000), "more than 64,000,000 pixels"),
    "a gif": (png(PICTURE, "GIF"), "cannot be read as an image"),
}


@pytest.mark.parametrize("file, reason", WRONG_IMAGES.values(), ids=WRONG_IMAGES)
def test_a_wrong_image_is_told(images, file, reason):
    for sent in (
        {"json": {"image": as_text(file)}} if file else {"json": {"image": "===="}},
        {"content": file, "headers": {"content-type": "image/png"}},
        {"files": {"file": ("x.png", file)}},
    ):
        found = images.post(**sent)
        assert found.status_code == (413 if "pixels" in reason else 422), found.text
        assert reason in found.json()["error"] or "base64" in found.json()["error"]


@pytest.mark.parametrize("content, kind, status, words", [
    (b"a,b", "text/csv", 415, "should be application/json or image/png"),
    (b"--x\r\nbroken", "multipart/form-data; boundary=x", 422, "form"),
    (b"x", "multipart/form-data", 422, "form"),
    (b'--x\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n--x--\r\n', "multipart/form-data; boundary=x", 422, "field 'file'"),
])  # fmt: skip
def test_a_wrong_form_is_told(images, content, kind, status, words):
    found = images.post(content=content, headers={"content-type": kind})
    assert (found.status_code, words in found.json()["error"]) == (status, True), found.text


def test_paths_that_are_not_there(texts):
    assert (texts.get("/nowhere").status_code, texts.get("/predict").status_code) == (404, 405)
    assert texts.get("/nowhere").json() == {"error": "Not Found"}


# ---- what it tells of itself


def test_what_it_tells_of_itself(texts, text_folder):
    assert texts.get("/health").json() == {"status": "alive"}
    facts = json.loads((text_folder / "lockstep.json").read_text())
    assert texts.get("/ready").json() == {"status": "ready", "model": f"news@{facts['digest'][:8]}"}
    info = texts.get("/info").json()
    assert info["digest"] == facts["digest"]
    assert info["labels"] == list(LABELS)
    assert info["limits"]["max_batch"] == 32
    assert "api_key" not in json.dumps(info)
    before = texts.metric('lockstep_requests_total{path="/predict",status="422"}')
    texts.post(json={})
    assert texts.metric('lockstep_requests_total{path="/predict",status="422"}') == before + 1


def test_the_examples_are_true(texts, images):
    for server in (texts, images):
        for path in ("/predict", "/predict/batch"):
            operation = server.get("/openapi.json").json()["paths"][path]["post"]
            asked = operation["requestBody"]["content"]["application/json"]["example"]
            told = operation["responses"]["200"]["content"]["application/json"]["example"]
            found = server.post(path, json=asked).json()
            assert found["model"] == told["model"]
            pairs = zip(found.get("predictions", [found]), told.get("predictions", [told]), strict=True)
            assert all(near(one["probabilities"], list(other["probabilities"].values())) for one, other in pairs)


def test_its_page_and_its_documentation_load_nothing_from_elsewhere(texts):
    for path in ("/", "/docs"):
        page = texts.get(path)
        assert page.headers["content-type"].startswith("text/html")
        assert "https://" not in page.text
    assert "default-src 'none'" in texts.get("/").headers["content-security-policy"]


# ---- limits


def test_a_key_is_wanted(tmp_path):
    key = "s\u00e9cret"
    with serving(image_export(tmp_path / "m"), variables={"LOCKSTEP_API_KEY": key}) as server:
        asked = {"json": {"image": as_text(png(PICTURE))}}
        for header in (
            {},
            {"authorization": "Bearer secret"},
            {"authorization": key.encode()},
            {"authorization": "Basic x"},
        ):
            found = server.post(headers=header, **asked)
            assert found.status_code == 401
            assert found.headers["www-authenticate"] == "Bearer"
        known = {"authorization": b"Bearer " + key.encode()}
        assert server.metric('lockstep_requests_total{path="/predict",status="401"}', headers=known) == 4
        assert server.post(headers=known, **asked).status_code == 200
        paths = {"/": 200, "/health": 200, "/ready": 200, "/docs": 200, "/info": 401, "/metrics": 401, "/-/reload": 401}
        assert {path: server.get(path).status_code for path in paths} == paths
        assert server.get("/static-offline-docs/swagger-ui.css").status_code == 200
        schema = server.get("/openapi.json").json()
        assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"


@pytest.fixture(scope="module")
def narrow(slow_folder):
    """A server that takes little and waits briefly."""
    with serving(slow_folder, "--queue", "2", "--max-batch", "1", "--timeout", "1.5") as server:
        yield server


def test_a_full_queue_and_a_late_answer(narrow):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: asking(narrow), range(8)))
    codes = sorted(each.status_code for each in found)
    assert {503, 504} <= set(codes) <= {200, 503, 504}, codes  # the first may be late, too
    assert codes.count(503) >= 4
    assert all(each.headers["retry-after"] == "1" for each in found if each.status_code == 503)
    assert asking(narrow, png(PICTURE)).status_code == 200
    failed = asking(narrow, POISON)  # the model's own fault, told as such
    assert (failed.status_code, "the model failed" in failed.json()["error"]) == (500, True)
    assert narrow.metric('lockstep_requests_total{path="/predict",status="500"}') >= 1
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # and one that fails takes nobody with it
        poison, other = pool.submit(asking, narrow, POISON), pool.submit(asking, narrow, png(PICTURE))
        assert (poison.result().status_code, other.result().status_code) == (500, 200)


def test_a_batch_that_never_fits_is_wrong(narrow):
    found = narrow.post("/predict/batch", json={"images": [as_text(png(PICTURE))] * 3})
    assert found.status_code == 422
    assert found.json()["error"] == "images: this server takes 2 at a time"


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"


def connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_nobody_works_for_a_client_that_has_gone(narrow):
    """Its inputs leave the queue, which has room for two, and the model, which takes a second for each."""
    done = narrow.metric("lockstep_batch_size_count")
    for _ in range(2):
        crowd = []
        while narrow.metric("lockstep_queue_inputs") < 2:
            crowd.append(connection(narrow))
            crowd[-1].sendall(HEAD % len(SLOWLY) + SLOWLY)
        for each in crowd:
            each.close()
        end = time.monotonic() + 10
        while narrow.metric("lockstep_queue_inputs"):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert asking(narrow, png(PICTURE)).status_code == 200
    assert narrow.metric("lockstep_batch_size_count") <= done + 3


def test_bodies_that_are_held_have_a_limit(tmp_path):
    """32 of the largest size; here so many come nearly whole, and the rest never comes."""
    with serving(image_export(tmp_path / "m"), "--max-body-mb", "0.001") as server, contextlib.ExitStack() as opened:
        crowd = [opened.enter_context(connection(server)) for _ in range(32)]
        for each in crowd:
            each.sendall(HEAD % 1048 + b"a" * 1040)
        full = 422  # as this is no picture; a moment later, when all the others have come, it is too much
        while full == 422:
            found = server.post(content=b"a" * 1048, headers={"content-type": "image/png"})
            full = found.status_code
        assert (full, found.headers["retry-after"]) == (503, "1")
        for each in crowd:
            each.close()
        assert asking(server, png(PICTURE)).status_code == 200


def test_a_request_that_comes_too_slowly(narrow):
    with connection(narrow) as slow:
        slow.sendall(HEAD % 1000 + b"abc")
        with connection(narrow) as gone:
            gone.sendall(HEAD % 1000 + b"abc")
        assert asking(narrow, png(PICTURE)).status_code == 200
        answer = b"".join(iter(lambda: slow.recv(1000), b""))  # until the server closes the connection
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not come whole within 1.5 s" in answer
