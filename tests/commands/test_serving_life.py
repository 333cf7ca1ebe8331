"""A server's life: it answers what has come before it ends, and takes a newer model without dropping a request."""

import concurrent.futures
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from served import PICTURE, asking, image_export, png, serving, slow_export
from typer.testing import CliRunner

from lockstep.base import trust
from lockstep.cli._app import app


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory):
    return slow_export(tmp_path_factory.mktemp("slow") / "slow")


def test_sigterm_answers_what_has_come(slow_folder):
    with serving(slow_folder, "--max-batch", "1") as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(asking, server) for _ in range(2)]
        server.queued(1)
        code, output = server.end()
        assert [each.result().status_code for each in asked] == [200, 200]
        assert code == 0
        assert output == "ending: answering what has come, for at most 20 s\n"


def test_a_drain_has_an_end(slow_folder):
    with (
        serving(slow_folder, "--max-batch", "1", "--drain", "1") as server,
        concurrent.futures.ThreadPoolExecutor(9) as pool,
    ):
        asked = [pool.submit(asking, server) for _ in range(9)]
        server.queued(4)
        code, output = server.end(signal.SIGINT)
        assert code == 0
        codes = [each.result().status_code for each in asked]
        assert set(codes) == {200, 503}, codes
        assert "Traceback" not in output


def test_a_newer_export_takes_over_without_a_lost_request(tmp_path):
    folder = image_export(tmp_path / "m", seed=0)
    with serving(folder) as server:
        before, codes, stop = server.get("/ready").json()["model"], [], threading.Event()

        def load():
            while not stop.is_set():
                codes.append(asking(server, png(PICTURE)).status_code)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            running = [pool.submit(load) for _ in range(4)]
            image_export(folder, seed=1)
            found = server.post("/-/reload").json()
            image_export(folder, seed=2)
            server.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 10
            while server.get("/ready").json()["model"] == found["model"] and time.monotonic() < end:
                time.sleep(0.05)
            stop.set()
            [each.result() for each in running]
        assert found["before"] == before
        assert len({before, found["model"], server.get("/ready").json()["model"]}) == 3
        assert set(codes) == {200}
        for header in ("x-forwarded-for", "origin"):
            assert server.post("/-/reload", headers={header: "127.0.0.1"}).status_code == 403
        last = server.get("/ready").json()["model"]
        told = server.get("/openapi.json").json()["paths"]["/predict"]["post"]["responses"]["200"]
        assert told["content"]["application/json"]["example"]["model"] == last
        (folder / "lockstep.json").write_text("{")
        broken = server.post("/-/reload")
        assert broken.status_code == 409
        assert "is still served" in broken.json()["error"]
        assert asking(server, png(PICTURE)).json()["model"] == last


def test_mistakes_on_the_command_line(slow_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, words in {
            ("nowhere",): "nowhere is no run, no checkpoint and no export",
            (slow_folder, "--port", port): "choose another --port",
            (slow_folder, "--device", "cuda"): "device cuda cannot be used",
            (slow_folder, "--drain", "inf"): "less than or equal to",
            (slow_folder, "--timeout", "1e9"): "less than or equal to",
            (slow_folder, "--max-body-mb", "inf"): "less than or equal to",
            (slow_folder, "--dtype", "fp8"): "'fp8' is not one of 'fp32'",
            (slow_folder, "--host", "192.0.2.1"): "cannot listen on 192.0.2.1",
            (slow_folder, "--api-key", ""): "the API key is empty",
            (slow_folder, "--api-key", "a key "): "ends with a space",
        }.items():
            done = CliRunner().invoke(app, ["serve", *map(str, arguments)])
            assert (done.exit_code, words in done.stderr, done.stdout) == (2, True, ""), done.output


SHORTLY = """
import sys
from lockstep.cli._app import app
from lockstep.inference.serving import server

server.LOADING_SECONDS = 5
app(["serve", sys.argv[1], "--port", "0", "--timeout", "0.1"])
"""


def test_a_model_that_never_answers_is_told(slow_folder, tmp_path):
    """Here the user's own code, which is known; so is a torch_export program that is trusted."""
    folder = shutil.copytree(slow_folder, tmp_path / "endless")
    code = (folder / "slow.py").read_text().replace("self.layer(", "time.sleep(10**6) or self.layer(")
    (folder / "slow.py").write_text(code)
    trust.remember([trust.Code.of(folder / "slow.py", code.encode())])
    command = [sys.executable, "-c", SHORTLY, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("the model has not loaded and predicted within 5 s: it may have no end")


def test_the_second_signal_ends_at_once(slow_folder):
    with serving(slow_folder, "--max-batch", "1") as server, concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(asking, server) for _ in range(9)]
        server.queued(4)
        server.process.terminate()
        assert server.process.stdout.readline().startswith("ending")
        server.end(signal.SIGINT)
        [each.exception() for each in asked]


def test_a_reload_comes_to_its_end_without_its_client(tmp_path):
    folder = image_export(tmp_path / "m", seed=0)
    with serving(folder) as server:
        before = server.get("/ready").json()["model"]
        image_export(folder, seed=1)
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /-/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        end = time.monotonic() + 20
        while server.get("/ready").json()["model"] == before:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_newer_export_brings_its_own_code(tmp_path):
    """Where it is trusted; and one that cannot predict does not take over."""
    folder = slow_export(tmp_path / "slow")
    with serving(folder, "--trust-code") as server:
        before = asking(server, png(PICTURE)).json()["probabilities"]
        code = (folder / "slow.py").read_text()
        (folder / "slow.py").write_text(code.replace("self.layer(", "-self.layer("))
        assert server.post("/-/reload").status_code == 200
        assert asking(server, png(PICTURE)).json()["probabilities"] != before
        (folder / "slow.py").write_text(code.replace("self.layer(", "float('nan') * self.layer("))
        broken = server.post("/-/reload")
        assert (broken.status_code, "which are no predictions" in broken.json()["error"]) == (409, True)
        assert asking(server, png(PICTURE)).status_code == 200
