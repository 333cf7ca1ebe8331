"""A crowd of clients, some of them bad: every good one gets its own answer, memory stays, and the end is clean."""

import asyncio
import concurrent.futures
import itertools
import json
import random
import sys
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
from http_load import ask, request_of
from served import serving, text_export

from lockstep.inference.trained_model import open_predictor

CLIENTS, BAD_ONE_IN = 16, 100
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def malformed(reader, writer):
    body = random.choice([b'{"text": ', b'{"text": 7}', b"\xff\xfe", b"[" * 5000, b'{"text": "\\ud800"}'])
    status, _ = await ask(reader, writer, HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert status == 422


async def oversized(reader, writer):
    body = b'{"text": "' + b"a" * (2 << 20) + b'"}'
    status, _ = await ask(reader, writer, HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert status == 413


async def slow(reader, writer):
    writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
    for _ in range(8):
        writer.write(b'{"')
        await asyncio.sleep(0.5)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408")


async def disconnecting(reader, writer):
    writer.write(random.choice([HEAD, HEAD + b"Content-Length: 99\r\n\r\n{", request_of("gone before the answer")]))
    await asyncio.sleep(random.choice([0, 0.01]))


class Crowd:
    """Clients that ask texts of all lengths, and what they got."""

    def __init__(self, port, texts, seconds):
        self.port, self.texts, self.end = port, texts, time.monotonic() + seconds
        self.numbers, self.answers, self.bad = itertools.count(1), [], 0

    async def client(self):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < self.end:
            if next(self.numbers) % BAD_ONE_IN == 0:  # for seconds, in which the server may close what is idle
                writer.close()
                await self.misbehave()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            index = random.randrange(len(self.texts))
            status, body = await ask(reader, writer, request_of(self.texts[index]))
            self.answers.append((index, status, body))
        writer.close()

    async def misbehave(self):
        kind = random.choice([malformed, oversized, slow, disconnecting])
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with suppress(ConnectionError):
            await kind(reader, writer)
        writer.close()
        self.bad += 1

    async def run(self):
        await asyncio.gather(*(self.client() for _ in range(CLIENTS)))


def rss(server, until, seen):
    process = psutil.Process(server.process.pid)
    while time.monotonic() < until:
        seen.append(process.memory_info().rss)
        time.sleep(0.5)


def check(crowd, expected):
    for index, status, body in crowd.answers:
        assert status == 200
        found = list(json.loads(body)["probabilities"].values())
        assert np.allclose(found, expected[index], atol=1e-4), crowd.texts[index]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seconds, growth", [pytest.param(5, 1.3, marks=pytest.mark.matrix), pytest.param(300, 1.05, marks=pytest.mark.soak)]
)
def test_a_crowd(tmp_path, minilm, seconds, growth):
    folder = text_export(tmp_path / "news", minilm)
    predictor = open_predictor(folder)
    texts = [" ".join(f"word{(n * 31 + k * 7) % 997}" for k in range(1 + n % 70)) for n in range(100)]
    expected = np.concatenate([predictor.scores(predictor.encode([text])) for text in texts])
    with serving(folder, "--max-body-mb", "1", "--timeout", "3") as server:
        port = int(server.url.rsplit(":", 1)[1])
        crowd, sizes = Crowd(port, texts, seconds), []
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(rss, server, crowd.end, sizes)
            asyncio.run(crowd.run())
        check(crowd, expected)
        settled, last = max(sizes[: len(sizes) // 3]), max(sizes[-len(sizes) // 3 :])
        words = f"{len(crowd.answers)} right answers, {crowd.bad} bad clients, {settled >> 20} then {last >> 20} MiB"
        sys.stdout.write(f"{words}\n")
        assert crowd.bad >= len(crowd.answers) // (2 * BAD_ONE_IN)
        assert last < settled * growth, words
        with concurrent.futures.ThreadPoolExecutor(48) as pool:  # the end, in the middle of work
            asked = [pool.submit(server.post, json={"text": text}) for text in texts[:48]]
            server.queued(1, times=1)  # they come and go: any moment of it will do
            code, _ = server.end()
            assert code == 0
            late = [each for each in asked if each.exception() or each.result().status_code != 200]
        assert not late
