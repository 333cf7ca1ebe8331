"""Whatever fits the published schema, and much that does not, gets an answer that the schema tells of."""

import json
import subprocess
import sys

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import image_export, serving, text_export

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
MESSY = st.text(st.characters(exclude_categories=[]), max_size=3000) | st.text(
    "\0\ud800\udfff\U0001f600\u202e a", max_size=50
)
CALM = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory, minilm):
    with serving(text_export(tmp_path_factory.mktemp("text") / "news", minilm)) as server:
        yield server


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    with serving(image_export(tmp_path_factory.mktemp("image") / "digits")) as server:
        yield server


def test_every_route_is_in_a_group_that_is_described(texts):
    """Else /docs shows a group "default"."""
    found = texts.get("/openapi.json").json()
    tags = {tag for path in found["paths"].values() for route in path.values() for tag in route["tags"]}
    assert tags == {tag["name"] for tag in found["tags"]} == {"predict", "model", "server"}
    assert all(len(route["tags"]) == 1 for path in found["paths"].values() for route in path.values())


@pytest.mark.parametrize("takes", ["texts", "images"])
def test_schemathesis(takes, request):
    """All its checks: statuses and bodies as documented, no server error, wrong input refused, right input taken."""
    server = request.getfixturevalue(takes)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--max-examples", "8", "--seed", "7", "--no-color", "--exclude-path", "/-/reload"]
    if takes == "images":  # no schema can say which base64 is a picture
        command += ["--exclude-checks", "positive_data_acceptance"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-6000:]


@CALM
@given(body=st.binary(max_size=2000) | st.builds(lambda text: text.encode("utf-8", "surrogatepass"), MESSY))
def test_any_bytes(texts, images, body):
    for server in (texts, images):
        for path in ("/predict", "/predict/batch"):
            for kind in (
                "application/json",
                "image/png",
                "multipart/form-data; boundary=x",
                "text/plain; charset=\xff",
            ):
                found = server.post(path, content=body, headers={"content-type": kind.encode("latin1")})
                assert found.status_code in (200, 415, 422), (kind, found.text)
                assert found.status_code == 200 or found.json()["error"]


@CALM
@given(value=ANYTHING | MESSY)
def test_any_json(texts, value):
    for path, asked in (("/predict", {"text": value}), ("/predict", value), ("/predict/batch", {"texts": value})):
        body = json.dumps(asked)
        found = texts.post(path, content=body, headers={"content-type": "application/json"})
        assert found.status_code in (200, 422), found.text
        if asked == {"text": value}:
            text = json.loads(body)["text"]  # two halves side by side have become one character
            is_text = isinstance(text, str) and text != "" and not any(0xD800 <= ord(c) <= 0xDFFF for c in text)
            assert (found.status_code == 200) == is_text


def test_the_server_is_well_after_all_that(texts, images):
    for server in (texts, images):
        assert httpx.get(server.url + "/ready").status_code == 200
