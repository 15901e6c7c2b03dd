"""Remote rewards: servers that answer, fail, lie and die are real processes here."""

import base64
import io
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from arborl.cli import main
from arborl.config.schema import RewardConfig
from arborl.core.errors import InputError
from arborl.rewards import client as client_module
from arborl.rewards import remote
from arborl.rewards.base import RewardFailed
from arborl.rewards.client import read_answer
from arborl.rewards.items import read_png
from arborl.rewards.remote import RemoteReward
from arborl.rewards.serve import serve

from conftest import ROOT
from launching import Fork

TOKEN = "a-token-of-tests"

DOCS = ROOT / "docs" / "rewards.md"

EXAMPLE = """\
import base64, hmac, json, os, sys, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = os.environ.get("ARBORL_REWARD_TOKEN", "")


def score(prompt, png, columns):  # yours; here pictures that compress well score high
    return -len(zlib.compress(png)) / 1e6


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(lambda: {"arborl": 1, "reward": "mine", "max_items": 64, "max_bytes": 2**28})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(
            lambda: {
                "version": 1,
                "scores": [
                    {"id": item["id"], "score": score(item["prompt"], base64.b64decode(item["png"]), item["columns"])}
                    for item in json.loads(body)["items"]
                ],
            }
        )

    def answer(self, make):
        allowed = not TOKEN or hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {TOKEN}")
        body = json.dumps(make() if allowed else {"error": "wrong token"})
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(body.encode())


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""The server of docs/rewards.md."""

FAKE = """
import json, re, ssl, sys, time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

counts = Counter()
answers = {}

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def send(self, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def drip(self, data, end):
        while True:
            for byte in data:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.1)
            data = end

    def do_GET(self):
        mode = self.path.split("/")[1]
        if mode == "counts":
            return self.send(counts)
        if mode == "html":
            return self.send(b"<html>hello</html>")
        if mode == "redirect":
            return self.send(b"", 302, Location="http://127.0.0.1:1/")
        if mode == "missing":
            return self.send(b"nothing here", 404)
        if mode == "later":
            return self.send({"arborl": 2})
        if mode == "mute":
            time.sleep(30)
        about = {"arborl": 1, "reward": "fake", "max_items": 64, "max_bytes": 2**28}
        if mode == "few":
            about |= {"max_items": 3}
        if mode == "small":
            about |= {"max_bytes": 100_000}
        return self.send(about)

    def do_POST(self):
        mode = self.path.split("/")[1]
        counts[mode] += 1
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        scores = [{"id": i["id"], "score": float(i["prompt"])} for i in items]
        if mode == "slow":
            time.sleep(0.1)
        if mode in ("mute", "hang"):
            time.sleep(30)
        if mode == "drip":
            self.send(b"")
            self.drip(b"", b" ")
        if mode == "drip_head":
            self.drip(b"HTTP/1.1 200 OK\\r\\nX-Slow: ", b"x")
        if mode == "endless":
            self.send(b"[")
            while True:
                self.wfile.write(b"0," * 10000)
        if mode == "backwards":
            scores.reverse()
        if mode == "flaky" and counts[mode] % 2:
            return self.send({"error": "again"}, 503)
        if mode == "poison" and any(i["prompt"] == "5" for i in items):
            return self.send({"error": "the reward failed: five"}, 500)
        if mode == "cut":
            self.send(b'{"version": 1, "scor', Content_Length="1000")
            return self.connection.close()
        if mode == "redirect":
            return self.send(b"", 307, Location="http://127.0.0.1:1/score")
        if mode.startswith("status"):
            return self.send({"error": "as asked\\nand more"}, int(mode[6:]))
        if mode == "say":  # ids as if those of the request counted from 0
            shift = lambda found: f'"id": {int(found[1]) + items[0]["id"]}'
            said = re.sub(r'"id": (\\d+)', shift, items[0]["columns"]["say"])
            return self.send(said.encode("utf-8", "surrogatepass"))
        if mode.startswith("chunk"):
            self.send(b"", Transfer_Encoding="chunked")
            return self.wfile.write(f"{mode[5:]}\\r\\n".encode() + b"x" * 10_000)
        if mode == "cached":
            return self.send(answers.setdefault(mode, {"version": 1, "scores": scores}))
        if mode == "counted":
            scores = [{**score, "id": i} for i, score in enumerate(scores)]
        return self.send({"version": 1, "scores": scores})

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print(f"at {server.server_port}", flush=True)
server.serve_forever()
"""
"""A server that does what its path says: http://host:port/<mode>. A picture's score is the number its prompt is."""

REAL = """
import os, time, torch
from arborl.rewards.serve import serve

calls = []

def reward(images, prompts, columns):
    calls.append(prompts)
    kind = prompts[0].partition(" ")[0]
    mean = images.flatten(1).mean(1)
    if kind == "sleep":
        time.sleep(1)
    if kind == "calls":
        return mean * 0 + len(calls)
    if kind == "raise":
        raise RuntimeError("out of\\nluck")
    if kind == "exit":
        raise SystemExit(0)
    if kind == "parts":
        return {"mean": mean, "extra": torch.tensor([float("nan" if e is None else e) for e in columns["extra"]])}
    if kind == "empty":
        return {}
    if kind == "inf":
        return mean / 0
    if kind == "short":
        return mean[:-1]
    if kind == "ints":
        return torch.ones(len(mean), dtype=torch.int64)
    if kind == "shape":
        return mean * 0 + images.shape[-1] + 1000 * len(prompts)
    if kind == "length":
        return torch.tensor([float(len(prompt)) for prompt in prompts])
    return mean

serve(reward, "test", "127.0.0.1", 0, os.environ.get("ARBORL_REWARD_TOKEN"), max_items=8, max_bytes=2**20)
"""


@contextmanager
def process(script: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server's process and port. It prints the port last in its first line's address, or was told it."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as made:
        assert made.stdout
        try:
            line = made.stdout.readline()
            assert line, "it did not start"
            yield made, int(re.findall(r"\d+", line)[-1])
        finally:
            made.kill()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(remote, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(client_module, "PROBE_SECONDS", 0.5)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    with process(FAKE, 0) as (_, port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    os.environ["ARBORL_REWARD_TOKEN"] = TOKEN
    try:
        with process(REAL) as (_, port):
            yield f"http://127.0.0.1:{port}"
    finally:
        del os.environ["ARBORL_REWARD_TOKEN"]


def client(url: object, size: int = 4, timeout: float = 5.0, retries: int = 1, token: str = "NO_SUCH") -> RemoteReward:
    return RemoteReward("far", RewardConfig(url=url, batch_size=size, timeout=timeout, retries=retries, token=token))


def numbered(count: int) -> tuple[Tensor, list[str], dict[str, list[object]]]:
    """Pictures whose score, of the fake server, is their number."""
    return torch.rand(count, 3, 8, 8), [str(i) for i in range(count)], {}


def counts(fake: str) -> dict[str, int]:
    return requests.get(f"{fake}/counts", timeout=5).json()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            requests.get(f"http://127.0.0.1:{port}/", timeout=1)
            return
        except requests.ConnectionError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


class TestScores:
    def test_are_those_of_the_function_in_the_order_of_the_pictures(self, real: str):
        reward = client(real, size=3, token="ARBORL_REWARD_TOKEN")
        reward.check()
        images = torch.rand(10, 3, 16, 24)
        scores = reward(images, [f"mean {i}" for i in range(10)], {})
        assert isinstance(scores, Tensor)
        assert scores.dtype == torch.float32
        # Each pixel is off by half a level at most.
        assert (scores - images.flatten(1).mean(1)).abs().max() <= 0.5 / 255
        exact = ((images * 255).round() / 255).flatten(1).mean(1)
        torch.testing.assert_close(scores, exact, rtol=0, atol=1e-6)
        assert reward.take_failures() == []

    def test_of_parts_and_of_videos(self, real: str):
        reward = client(real, size=3, token="ARBORL_REWARD_TOKEN")
        videos = torch.rand(7, 2, 3, 8, 16)
        extra: list[object] = [0.5, None, 1, 2, 3, 4, -1e-3]
        scores = reward(videos, ["parts"] * 7, {"extra": extra, "other": [{"a": ["ü"]}] * 7})
        assert isinstance(scores, Mapping)
        assert list(scores) == ["mean", "extra"]
        exact = ((videos * 255).round() / 255).flatten(1).mean(1)
        torch.testing.assert_close(scores["mean"], exact, rtol=0, atol=1e-6)
        wanted = torch.tensor([math.nan if value is None else float(str(value)) for value in extra])
        torch.testing.assert_close(scores["extra"], wanted, rtol=0, atol=0, equal_nan=True)

    def test_survive_any_order_of_answers(self, fake: str):
        scores = client([f"{fake}/backwards", f"{fake}/slow", f"{fake}/plain"])(*numbered(23))
        assert isinstance(scores, Tensor)
        assert scores.tolist() == list(range(23))

    def test_of_grey_and_of_broken_pictures(self, real: str):
        reward = client(real, token="ARBORL_REWARD_TOKEN")
        images = torch.full((3, 1, 8, 8), 0.2)
        images[1, 0, 3, 3] = math.nan
        scores = reward(images, ["mean"] * 3, {})
        assert isinstance(scores, Tensor)
        torch.testing.assert_close(scores, torch.tensor([0.2, math.nan, 0.2]), equal_nan=True)
        out_of_range = reward(torch.tensor([-1.0, 2.0])[:, None, None, None].expand(2, 3, 8, 8), ["mean"] * 2, {})
        assert isinstance(out_of_range, Tensor)
        assert out_of_range.tolist() == [0, 1]

    def test_of_nothing(self, fake: str):
        scores = client(f"{fake}/plain")(torch.rand(0, 3, 8, 8), [], {})
        assert isinstance(scores, Tensor)
        assert scores.shape == (0,)

    def test_are_asked_for_in_pieces_a_server_takes(self, fake: str):
        before = counts(fake).get("few", 0)
        scores = client(f"{fake}/few", size=32)(*numbered(9))
        assert isinstance(scores, Tensor)
        assert scores.tolist() == list(range(9))
        assert counts(fake)["few"] - before == 3
        client(f"{fake}/small", size=32)(torch.rand(9, 3, 64, 64), ["1"] * 9, {})
        assert counts(fake)["small"] == 5, "of 16 KiB each, and with text perhaps twice that"
        with pytest.raises(RewardFailed, match="takes 100000 bytes a request, and 1 pictures have"):
            client(f"{fake}/small")(torch.rand(1, 3, 256, 256), ["1"], {})

    def test_of_the_server_in_the_docs(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("ARBORL_REWARD_TOKEN", TOKEN)
        port = free_port()
        script = f"print({port}, flush=True)\n{EXAMPLE}"
        with process(script, port):
            wait_for(port)
            reward = client(f"http://127.0.0.1:{port}", token="ARBORL_REWARD_TOKEN")
            reward.check()
            images = torch.cat([torch.rand(5, 3, 32, 32), torch.zeros(1, 3, 32, 32)])
            scores = reward(images, ["a prompt"] * 6, {"colour": ["red"] * 6})
            assert isinstance(scores, Tensor)
            assert scores.argmax() == 5
            with pytest.raises(InputError, match=r"refuses the token; try: the server's token in \$NO_SUCH"):
                client(f"http://127.0.0.1:{port}").check()

    def test_docs_show_the_server_that_was_tried(self):
        assert EXAMPLE.strip() in DOCS.read_text()


class TestPictures:
    @given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**30))
    def test_arrive_as_they_were(self, height: int, width: int, seed: int):
        sent = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        with Image.open(io.BytesIO(base64.b64decode(client_module.png(sent)))) as picture:
            picture.verify()
        assert torch.equal(read_png(client_module.png(sent), 81), torch.from_numpy(sent).permute(2, 0, 1))


class TestServersThatFail:
    def test_two_share_the_work_and_one_may_die(self):
        with process(FAKE, 0) as (_, first), process(FAKE, 0) as (dying, second):
            urls = [f"http://127.0.0.1:{port}/slow" for port in (first, second)]
            reward = client(urls, size=1, retries=2)
            threading.Timer(0.5, dying.kill).start()
            scores = reward(*numbered(16))
            assert isinstance(scores, Tensor)
            assert scores.tolist() == list(range(16))
            assert counts(urls[0].removesuffix("/slow"))["slow"] <= 15, "the other had its share before it died"
            assert reward.take_failures() == []

    def test_all_work_is_shared(self, fake: str):
        with process(FAKE, 0) as (_, port):
            other, before = f"http://127.0.0.1:{port}", counts(fake).get("slow", 0)
            client([f"{fake}/slow", f"{other}/slow"], size=1)(*numbered(10))
            assert min(counts(fake)["slow"] - before, counts(other)["slow"]) >= 2

    def test_one_that_died_is_used_again_when_it_is_back(self):
        with process(FAKE, 0) as (made, port):
            reward = client(f"http://127.0.0.1:{port}/plain")
            assert isinstance(reward(*numbered(8)), Tensor)
            made.kill()
            made.wait()
            for _ in range(2):
                start = time.monotonic()
                with pytest.raises(RewardFailed, match=r"^http\S+ does not answer \(Connection ref"):
                    reward(*numbered(8))
                assert time.monotonic() - start < 5
        assert reward.servers[0].down
        with process(FAKE, port) as (_, _port):
            scores = reward(*numbered(8))
            assert isinstance(scores, Tensor)
            assert scores.tolist() == list(range(8))
            assert not reward.servers[0].down

    @pytest.mark.parametrize("mode", ["hang", "drip", "drip_head", "mute"])
    def test_slow_ones_hold_nobody_longer_than_the_timeout(self, fake: str, mode: str):
        reward = client(f"{fake}/{mode}", timeout=0.5, retries=1)
        start = time.monotonic()
        with pytest.raises(RewardFailed, match=r"does not answer within 0\.5 s|timed out"):
            reward(*numbered(2))
        assert time.monotonic() - start < 10

    def test_slow_ones_are_relieved_by_others(self, fake: str):
        scores = client([f"{fake}/hang", f"{fake}/plain"], size=1, timeout=0.5)(*numbered(6))
        assert isinstance(scores, Tensor)
        assert scores.tolist() == list(range(6))

    def test_flaky_ones_are_asked_again(self, fake: str):
        scores = client(f"{fake}/flaky")(*numbered(12))
        assert isinstance(scores, Tensor)
        assert scores.tolist() == list(range(12))

    def test_waits_double(self, fake: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(remote, "RETRY_SECONDS", 0.1)
        start = time.monotonic()
        with pytest.raises(RewardFailed, match=r"answers 500: as asked and more$"):
            client(f"{fake}/status500", retries=3)(*numbered(1))
        assert 0.7 <= time.monotonic() - start < 10

    def test_what_one_picture_breaks_costs_only_its_own_piece(self, fake: str):
        reward = client(f"{fake}/poison", retries=2)
        scores = reward(*numbered(12))
        assert isinstance(scores, Tensor)
        assert scores.isnan().nonzero().flatten().tolist() == [4, 5, 6, 7]
        assert scores[[0, 3, 8, 11]].tolist() == [0, 3, 8, 11]
        ((count, line),) = reward.take_failures()
        assert count == 4
        assert line == f"{fake}/poison answers 500: the reward failed: five"
        assert reward.take_failures() == []

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
    def test_refusals_are_final(self, fake: str, status: int):
        with pytest.raises(RewardFailed, match=f"answers {status}: as asked and more$"):
            client(f"{fake}/status{status}", retries=3)(*numbered(2))
        assert counts(fake)[f"status{status}"] == 1

    def test_what_one_refuses_another_may_take(self, fake: str):
        scores = client([f"{fake}/status401", f"{fake}/plain"])(*numbered(12))
        assert isinstance(scores, Tensor)
        assert scores.tolist() == list(range(12))

    @pytest.mark.parametrize(
        ("mode", "problem"),
        [
            ("endless", "more than 69632 bytes"),
            ("cut", "does not answer|garbage"),
            ("redirect", "redirects to http://127.0.0.1:1/score, which is not followed"),
            ("status429", "answers 429"),
        ],
    )
    def test_other_ways_to_fail(self, fake: str, mode: str, problem: str):
        with pytest.raises(RewardFailed, match=problem) as told:
            client(f"{fake}/{mode}")(*numbered(1))
        assert str(told.value).isprintable()

    @pytest.mark.parametrize("size", [b"-1", b"-5"])
    def test_chunks_of_less_than_nothing(self, fake: str, size: bytes):
        reward = client(f"{fake}/chunk{size.decode()}", retries=0)
        with pytest.raises(RewardFailed, match=rf"does not answer \(a chunk of {size.decode()} bytes\)"):
            reward(*numbered(1))

    def test_that_answer_another_request_are_not_believed(self, fake: str):
        images = torch.rand(4, 3, 8, 8)
        first = client(f"{fake}/cached", retries=0)(images, ["0", "1", "2", "3"], {})
        assert isinstance(first, Tensor)
        assert first.tolist() == [0, 1, 2, 3]
        with pytest.raises(RewardFailed, match=r"the ids are not those of the 4 items\)$"):
            client(f"{fake}/cached", retries=0)(images, ["9", "8", "7", "6"], {})
        with pytest.raises(RewardFailed, match="count from 0: a server answers the ids it was sent"):
            client(f"{fake}/counted", retries=0)(images, ["9", "8", "7", "6"], {})

    def test_an_interrupt_ends_the_call_at_once(self, fake: str):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        start = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                client([f"{fake}/hang", f"{fake}/drip"], timeout=20)(*numbered(8))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - start < 5

    def test_an_error_of_our_own_ends_the_call(self, fake: str):
        images, prompts, _ = numbered(4)
        with pytest.raises(InputError, match="cannot be sent as JSON"):
            client([f"{fake}/plain", f"{fake}/slow"], size=1)(images, prompts, {"when": [object()] * 4})


class TestProxies:
    """Of the environment, which `requests` takes unless it is told otherwise."""

    @pytest.fixture
    def proxy(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
        """What a proxy is sent."""
        seen: list[bytes] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def listen() -> None:
                with suppress(OSError):
                    while True:
                        with listener.accept()[0] as made:
                            seen.append(made.recv(1 << 16))
                            made.sendall(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")

            threading.Thread(target=listen, daemon=True).start()
            monkeypatch.setenv("FAR_TOKEN", TOKEN)
            monkeypatch.delenv("NO_PROXY")
            monkeypatch.delenv("no_proxy", raising=False)
            for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
            yield seen
            listener.shutdown(socket.SHUT_RDWR)

    def test_are_not_asked_for_this_machine(self, fake: str, proxy: list[bytes]):
        for url in (fake, fake.replace("127.0.0.1", "localhost")):
            client(f"{url}/plain", token="FAR_TOKEN").check()
        assert proxy == []

    def test_are_not_shown_the_token(self, proxy: list[bytes]):
        with pytest.raises(InputError, match=r"does not answer \(.*; asked directly, since a proxy would read"):
            client("http://reward.invalid", token="FAR_TOKEN").check()
        assert proxy == []
        with pytest.raises(InputError, match="does not answer"):
            client("https://reward.invalid", token="FAR_TOKEN").check()
        assert len(proxy) == 1
        assert proxy[0].startswith(b"CONNECT reward.invalid:443 ")
        assert TOKEN.encode() not in proxy[0]


class TestGarbage:
    @pytest.mark.parametrize(
        "said",
        [
            "",
            "no JSON",
            "<html><body>502</body></html>",
            "null",
            "[]",
            "[" * 50_000,
            '{"version": 1}',
            '{"version": 2, "scores": [{"id": 0, "score": 1}, {"id": 1, "score": 2}]}',
            '{"version": true, "scores": [{"id": 0, "score": 1}, {"id": 1, "score": 2}]}',
            '{"scores": [{"id": 0, "score": 1}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": {"0": 1, "1": 2}}',
            '{"version": 1, "scores": [1, 2]}',
            '{"version": 1, "scores": [{"score": 1}, {"score": 2}]}',
            '{"version": 1, "scores": [{"id": 0}, {"id": 1}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1}, {"id": 0, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1}, {"id": 1, "score": 2}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 1, "score": 1}, {"id": 2, "score": 2}]}',
            '{"version": 1, "scores": [{"id": "0", "score": 1}, {"id": "1", "score": 2}]}',
            '{"version": 1, "scores": [{"id": false, "score": 1}, {"id": true, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "id": 1, "score": 1}, {"id": 0, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": "1"}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": true}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": [1]}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": NaN}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": Infinity}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1e999}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1e39}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1' + "0" * 5000 + '}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"a": 1}}, {"id": 1, "score": 2}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"a": 1}}, {"id": 1, "score": {"b": 2}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"a": 1}}, {"id": 1, "score": {}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {}}, {"id": 1, "score": {}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"": 1}}, {"id": 1, "score": {"": 2}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"a": {"b": 1}}}, {"id": 1, "score": {"a": 1}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": {"a": 1, "a": 2}}, {"id": 1, "score": {"a": 1}}]}',
            '{"version": 1, "scores": [{"id": 0, "score": 1}, {"id": 1, "score": 2}]} more',
            '{"version": 1, "scores": [{"id": 0, "score": 1}, {"id": 1, "sco\udcff": 2}]}',
        ],
    )
    def test_is_no_score(self, fake: str, said: str):
        reward = client(f"{fake}/say", retries=0)
        with pytest.raises(RewardFailed, match="answers garbage") as told:
            reward(torch.rand(2, 3, 8, 8), ["0", "1"], {"say": [said] * 2})
        assert str(told.value).isprintable()

    def test_null_is_no_score(self, fake: str):
        def said(*scores: str) -> Tensor | dict[str, Tensor]:
            rows = ", ".join(f'{{"id": {i}, "score": {score}}}' for i, score in enumerate(scores))
            columns: dict[str, Sequence[object]] = {"say": [f'{{"version": 1, "scores": [{rows}]}}'] * len(scores)}
            return reward(torch.rand(len(scores), 3, 8, 8), ["0"] * len(scores), columns)

        reward = client(f"{fake}/say")
        nothing = said("null", "null")
        assert isinstance(nothing, Tensor)
        assert nothing.isnan().all()
        parts = said('{"a": 1, "b": null}', "null", '{"b": 2, "a": -3}')
        assert isinstance(parts, Mapping)
        assert str(parts["a"].tolist()) == "[1.0, nan, -3.0]"
        assert str(parts["b"].tolist()) == "[nan, nan, 2.0]"
        nothing = said("null")
        assert isinstance(nothing, Mapping), "it has parts, as is known by now"
        with pytest.raises(RewardFailed, match="plain scores where other answers have a, b"):
            said("1", "2")
        assert isinstance(said('{"a": 1, "b": 1}'), Mapping)

    def test_lost_pieces_are_nan_in_every_part(self, fake: str):
        sound = '{"version": 1, "scores": [{"id": 0, "score": {"a": 1, "b": 2}}]}'
        reward = client(f"{fake}/say", size=1, retries=0)
        scores = reward(torch.rand(3, 3, 8, 8), ["0"] * 3, {"say": [sound, sound.replace('"b"', '"c"'), sound]})
        assert isinstance(scores, Mapping)
        assert {name: str(values.tolist()) for name, values in scores.items()} == {
            "a": "[1.0, nan, 1.0]",
            "b": "[2.0, nan, 2.0]",
        }
        assert len(reward.take_failures()) == 1

    ids = st.sampled_from([0, 1, 2, 3, -1, True, False, 1.0, "1", None, 2**70])
    values = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2), st.just(10**400), st.just([1])
    )
    scores = st.one_of(values, st.dictionaries(st.sampled_from(["a", "b", ""]), values, max_size=2))
    rows = st.one_of(
        st.fixed_dictionaries({"id": ids, "score": scores}),
        st.fixed_dictionaries({"id": st.integers(0, 2), "score": st.floats(-1, 1)}),
        st.dictionaries(st.sampled_from(["id", "score"]), values),
        values,
    )
    whole = st.permutations([0, 1, 2]).flatmap(
        lambda order: st.tuples(
            *(st.fixed_dictionaries({"id": st.just(i), "score": TestGarbage.scores}) for i in order)
        )
    )
    number = st.none() | st.floats(-1, 1)
    parts = st.fixed_dictionaries({"id": st.integers(0, 2), "score": st.fixed_dictionaries({"b": number, "a": number})})
    anything = st.one_of(
        st.fixed_dictionaries(
            {"version": st.just(1), "scores": st.lists(parts, min_size=2, max_size=3, unique_by=lambda row: row["id"])}
        ),
        st.fixed_dictionaries({"version": st.sampled_from([1, 1, 1, 2, True]), "scores": st.lists(rows, max_size=4)}),
        st.fixed_dictionaries({"version": st.just(1), "scores": whole.map(list)}),
        st.recursive(values, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=2), inner), max_leaves=5),
    )

    @given(anything, st.integers(0, 400), st.booleans())
    def test_is_never_a_wrong_or_shifted_score(self, said: Any, cut: int, whole: bool):
        text = json.dumps(said).encode()
        text = text if whole else text[:cut]
        try:
            found = read_answer(text, 3)
        except ValueError:
            return
        told = {row["id"]: row["score"] for row in json.loads(text)["scores"]}
        assert sorted(told) == [0, 1, 2]
        assert len(said["scores"]) == 3
        for part, scores in found.items():
            for i, score in enumerate(scores):
                row = told[i]
                value = row if row is None or part == "" else row[part]
                assert type(value) in (int, float) or value is None
                assert math.isnan(score) if value is None else score == value
                assert row is None or part == "" or set(row) == set(found)
        if not found:
            assert all(score is None for score in told.values())

    @given(st.permutations(range(5)), st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=5, max_size=5))
    def test_is_not_what_obeys_the_protocol(self, order: list[int], scores: list[float | None]):
        said = {"version": 1, "scores": [{"id": i, "score": scores[i]} for i in order], "more": 1}
        found = read_answer(json.dumps(said).encode(), 5).get("", [math.nan] * 5)
        assert [None if math.isnan(score) else score for score in found] == scores


class TestSettings:
    @pytest.mark.parametrize(
        "url",
        [
            *("", "host:80", "ftp://host", "http://", "http://:80", "http://h/?q=1", "http://h/#a", "http://h:x"),
            *("http://h:99999", "http://[::1", "http://a b", "http://h\n", 3, None, [], ["http://h", ""]),
            "http://user:secret@h",
        ],
    )
    def test_an_address_that_is_none_is_told(self, url: object):
        with pytest.raises(InputError, match=r"^rewards\.far\.url") as told:
            client(url)
        assert "secret" not in str(told.value)
        assert str(told.value).isprintable()

    def test_addresses(self):
        found = client(["http://a:1/", "https://b/path/", "http://[::1]:3", "http://a:1"]).servers
        assert [server.url for server in found] == ["http://a:1", "https://b/path", "http://[::1]:3"]

    def test_a_token_that_cannot_be_sent_is_not_shown(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("SECRET", "hidden\nthing")
        with pytest.raises(InputError, match=r"rewards\.far\.token=\$SECRET: holds what an HTTP") as told:
            client("http://h", token="SECRET")
        assert "hidden" not in str(told.value)

    @pytest.mark.parametrize(
        ("mode", "problem"),
        [
            ("mute", r"does not answer within 0\.5 s"),
            ("html", "is not a reward server"),
            ("missing", r"is not a reward server \(answers 404: Not Found\)"),
            ("later", "speaks version 2 of the protocol"),
            ("redirect", "redirects to http://127.0.0.1:1/, which is not followed"),
        ],
    )
    def test_check_tells_what_is_wrong(self, fake: str, mode: str, problem: str):
        with pytest.raises(InputError, match=rf"^rewards\.far\.url={fake}/{mode}: {problem}"):
            client([f"{fake}/plain", f"{fake}/{mode}"], timeout=0.5).check()

    def test_check_tells_who_is_not_there(self):
        url = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(InputError, match=rf"^rewards\.far\.url={url}: does not answer \(Connection refused\)$"):
            client(url).check()
        with pytest.raises(InputError, match=r"does not answer \("):
            client("http://no-such-host.invalid").check()

    def test_check_tells_a_wrong_token(self, real: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setenv("WRONG", "guess")
        for variable in ("WRONG", "NO_SUCH"):
            with pytest.raises(
                InputError, match=rf"{real}: refuses the token; try: the server's token in \${variable}$"
            ):
                client(real, token=variable).check()
            with pytest.raises(RewardFailed, match=r"answers 401: (wrong token|a token is required)$"):
                client(real, token=variable, retries=3)(torch.rand(8, 3, 128, 128), ["mean"] * 8, {})
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        client(real, token="ARBORL_REWARD_TOKEN").check()

    @pytest.mark.skipif(not shutil.which("openssl"), reason="makes the certificate")
    def test_certificates(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        what = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
        subprocess.run(["openssl", *what.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
        with process(FAKE, 0, certificate, key) as (_, port):
            url = f"https://127.0.0.1:{port}"
            with pytest.raises(InputError, match=r"does not answer \(certificate: self.signed certificate\)$"):
                client(f"{url}/plain").check()
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
            scores = client(f"{url}/plain")(*numbered(5))
            assert isinstance(scores, Tensor)
            assert scores.tolist() == list(range(5))
            for mode in ("drip", "drip_head"):
                with pytest.raises(RewardFailed, match="does not answer within"):
                    client(f"{url}/{mode}", timeout=0.5, retries=0)(*numbered(1))


def png(size: tuple[int, int] = (4, 4), mode: str = "RGB", form: str = "PNG", colour: Any = None) -> str:
    buffer = io.BytesIO()
    Image.new(mode, size, colour if colour is not None else 0).save(buffer, form)
    return base64.b64encode(buffer.getvalue()).decode()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> str:
    """A PNG that says it is huge, and is a kilobyte."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + data).decode()


class TestServer:
    @pytest.fixture
    def post(self, real: str):
        def send(
            items: object, body: Any = None, token: str = TOKEN, kind: str = "application/json", timeout: float = 20
        ):
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            body = json.dumps({"version": 1, "items": items}) if body is None else body
            answer = requests.post(f"{real}/score", data=body, headers=headers, timeout=timeout)
            found = answer.json()
            if answer.status_code != 200:
                assert list(found) == ["error"]
                assert found["error"].isprintable()
                return answer.status_code, found["error"]
            return 200, {row["id"]: row["score"] for row in found["scores"]}

        return send

    def test_says_what_it_is(self, real: str):
        answer = requests.get(real, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5)
        assert answer.json() == {"arborl": 1, "reward": "test", "max_items": 8, "max_bytes": 2**20}
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": TOKEN}, {"Authorization": "Bearer ü"}):
            encoded = {name: value.encode() for name, value in headers.items()}
            assert requests.get(real, headers=encoded, timeout=5).status_code == 401
        for path in ("/nowhere", "/score"):
            answer = requests.get(real + path, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5)
            assert answer.status_code in (404, 405)
            assert list(answer.json()) == ["error"]

    def test_answers_while_it_scores_and_scores_one_at_a_time(self, real: str, post: Any):
        item = {"id": 0, "prompt": "sleep", "png": png()}
        start = time.monotonic()
        workers = [threading.Thread(target=post, args=([item],)) for _ in range(2)]
        for worker in workers:
            worker.start()
        time.sleep(0.3)
        assert requests.get(real, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5).status_code == 200
        assert all(worker.is_alive() for worker in workers)
        for worker in workers:
            worker.join()
        assert time.monotonic() - start >= 2

    def test_scores_nothing_for_who_has_left(self, post: Any):
        _, before = post([{"id": 0, "prompt": "calls", "png": png()}])
        item = {"id": 0, "prompt": "sleep", "png": png()}
        first = threading.Thread(target=post, args=([item],))
        first.start()
        time.sleep(0.2)
        with pytest.raises(requests.Timeout):
            post([item], timeout=0.2)
        first.join()
        _, after = post([{"id": 0, "prompt": "calls", "png": png()}])
        assert after[0] - before[0] == 2

    @pytest.mark.parametrize(
        ("picture", "status"),
        [
            ("", 400),
            ("not base64!", 400),
            (base64.b64encode(b"no picture").decode(), 400),
            (png(form="GIF"), 400),
            (png(form="JPEG"), 400),
            (png(form="TIFF"), 400),
            (png((64, 64))[:80], 400),
            (png(mode="I;16"), 400),
            (bomb(4097, 4096), 413),
            (bomb(10_000, 10_000), 413),
            (bomb(60_000, 60_000), 413),
            (bomb(2**31 - 1, 2**31 - 1), 413),
            (bomb(64, 0), 400),
            (7, 400),
            (None, 400),
            (["a"], 400),
        ],
    )
    def test_refuses_what_is_no_picture(self, post: Any, picture: object, status: int):
        sound = {"id": 0, "prompt": "", "png": png()}
        for item in ({"id": 1, "prompt": "", "png": picture}, {"id": 1, "prompt": "", "frames": [png(), picture]}):
            assert post([sound, item])[0] == status

    def test_survives_broken_pictures(self, post: Any):
        """Any damage is a refusal, or a picture still."""
        buffer = io.BytesIO()
        Image.effect_noise((8, 8), 50).save(buffer, "PNG")
        draw = random.Random(0)
        seen = set()
        for _ in range(150):
            data = bytearray(buffer.getvalue())
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(8, len(data))] = draw.randrange(256)
            seen.add(post([{"id": 0, "prompt": "", "png": base64.b64encode(data).decode()}])[0])
        assert seen <= {200, 400, 413}

    @pytest.mark.parametrize(
        "item",
        [
            1,
            {},
            {"id": 0, "prompt": ""},
            {"prompt": "", "png": png()},
            {"id": "0", "prompt": "", "png": png()},
            {"id": True, "prompt": "", "png": png()},
            {"id": 0, "png": png()},
            {"id": 0, "prompt": 5, "png": png()},
            {"id": 0, "prompt": "x" * 100_001, "png": png()},
            {"id": 0, "prompt": "", "png": png(), "frames": [png()]},
            {"id": 0, "prompt": "", "frames": []},
            {"id": 0, "prompt": "", "frames": png()},
            {"id": 0, "prompt": "", "frames": [png(), png((4, 5))]},
            {"id": 0, "prompt": "", "png": png(), "columns": []},
        ],
    )
    def test_refuses_malformed_items(self, post: Any, item: object):
        assert post([item])[0] == 400

    @pytest.mark.parametrize(
        "body",
        [
            "",
            "{",
            "null",
            "[]",
            "[" * 50_000,
            b"\xff\xfe\x00",
            '{"items": []}',
            '{"version": 1, "items": []}',
            '{"version": 1, "items": {}}',
            '{"version": 2, "items": [{}]}',
            '{"version": 1, "version": 1, "items": [{"id": 0, "prompt": "", "png": "' + png() + '"}]}',
            '{"version": 1, "items": [{"id": 0, "prompt": "", "png": "' + png() + '", "columns": {"a": NaN}}]}',
        ],
    )
    def test_refuses_malformed_requests(self, post: Any, body: str | bytes):
        assert post(None, body)[0] == 400

    def test_limits(self, post: Any):
        item = {"prompt": "", "png": png()}
        assert post([item | {"id": 0}] * 2) == (400, "an id comes twice")
        assert post([item | {"id": i} for i in range(8)])[0] == 200
        assert post([item | {"id": i} for i in range(9)])[0] == 413
        assert post(None, b" " * (2**20 + 1))[0] == 413
        assert post(None, iter([b" " * 2**16] * 24))[0] == 411, "whose length was not told beforehand"
        assert post([item | {"id": 0}], token="x")[0] == 401
        assert post(None, b" " * 2**21, token="x")[0] == 401
        assert post([item | {"id": 0}], kind="text/plain")[0] == 400

    def test_a_lie_about_the_length_is_harmless(self, real: str, post: Any):
        host, port = real.removeprefix("http://").split(":")
        head = f"POST /score HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
        for length in ("5", "999999", "-1", "99999999999999999999"):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + b"{}" * 50)
        assert post([{"id": 0, "prompt": "", "png": png()}])[0] == 200

    def test_pictures_of_all_sizes_and_kinds_in_one_request(self, post: Any):
        kinds = [
            png((1, 1), colour=(255, 255, 255)),
            png((6, 4), "L", colour=51),
            png((4, 4), "RGBA", colour=(51, 51, 51, 7)),
            png((6, 4), colour=(0, 255, 255)),
            png((1, 1), "1", colour=1),
            png((5, 5), "P"),
            png((2, 2), "LA", colour=(102, 0)),
        ]
        items = [{"id": 10 - i, "prompt": f"mean {i}", "png": kind} for i, kind in enumerate(kinds)]
        status, found = post([*items, {"id": 99, "prompt": "video", "frames": [png((6, 4), colour="white")] * 3}])
        assert status == 200
        assert list(found) == [10, 9, 8, 7, 6, 5, 4, 99]
        assert list(found.values()) == pytest.approx([1, 0.2, 0.2, 2 / 3, 1, 0, 0.4, 1])
        sizes = [(8, 4), (4, 8), (8, 4), (8, 4)]
        status, found = post([{"id": i, "prompt": "shape", "png": png(size)} for i, size in enumerate(sizes)])
        assert (status, list(found.values())) == (200, [3008, 1004, 3008, 3008])

    def test_prompts_and_columns(self, post: Any):
        prompts = ["length", "", "x" * 10_000, "length 🌳\n\0"]
        status, found = post([{"id": i, "prompt": prompt, "png": png()} for i, prompt in enumerate(prompts)])
        assert (status, list(found.values())) == (200, [6, 0, 10_000, 10])
        columns: list[dict[str, Any]] = [{"extra": 1}, {}, {"extra": None}, {"extra": 2, "more": [{}]}]
        items = [{"id": i, "prompt": "parts", "png": png(), "columns": found} for i, found in enumerate(columns)]
        status, found = post(items)
        assert status == 200
        assert [score["extra"] for score in found.values()] == [1, None, None, 2]

    @pytest.mark.parametrize(
        ("kind", "problem"),
        [
            ("raise", "the reward failed: RuntimeError: out of"),
            ("exit", "the reward failed: SystemExit: 0"),
            ("inf", "infinite score"),
            ("short", r"float32 \(1,\), not a float tensor of shape \(2,\)"),
            ("ints", "int64"),
            ("empty", "without named parts"),
        ],
    )
    def test_tells_that_the_reward_failed(self, post: Any, kind: str, problem: str):
        picture = png(colour="white")
        status, told = post([{"id": i, "prompt": kind, "png": picture} for i in range(2)])
        assert status == 500
        assert re.search(problem, told)
        assert "Traceback" not in told

    def test_parts_must_not_depend_on_the_size(self, post: Any):
        items = [
            {"id": 0, "prompt": "parts", "png": png(), "columns": {"extra": 1}},
            {"id": 1, "prompt": "mean", "png": png((5, 5))},
        ]
        assert post(items)[0] == 500

    def test_serves_strangers_only_with_a_token(self):
        def reward(images: Tensor, prompts: Sequence[str], columns: Any) -> Tensor:
            return images.flatten(1).mean(1)

        for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
            for token in (None, ""):
                with pytest.raises(InputError, match=f"^--host={host}: would serve anyone who can reach it"):
                    serve(reward, "test", host, 0, token)
        with pytest.raises(InputError, match=r"^--host=192\.0\.2\.1: cannot be served at"):
            serve(reward, "test", "192.0.2.1", 0, TOKEN)
        with pytest.raises(InputError, match=r"^--device=nowhere: "):
            serve(reward, "test", device="nowhere")

    def test_a_port_that_is_taken_is_told(self, real: str):
        port = int(real.rpartition(":")[2])
        with pytest.raises(InputError, match=rf"^--port={port}: cannot be served at \(.*in use"):
            serve(lambda images, prompts, columns: images, "test", "127.0.0.1", port, None)


SERVED = """
import os
from pathlib import Path

calls = 0

def mortal(images, prompts, columns):
    global calls
    calls += 1
    if calls > int(os.environ.get("CALLS", "1000")):
        os._exit(1)
    return images.flatten(1).mean(1)
"""


@contextmanager
def served(reward: str, folder: Path, port: int = 0, calls: int = 1000) -> Iterator[str]:
    """`arborl serve` in another process."""
    words = ["serve", reward, "--port", str(port), "--device", "cpu"]
    environment = {"CALLS": str(calls), "ARBORL_REWARD_TOKEN": TOKEN}
    with Fork(*words, cwd=folder, environment=environment) as server:
        server.until(lambda: bool(re.findall(r"http://\S+\s", server.said)))
        yield re.findall(r"http://\S+", server.said)[0]
        with suppress(ProcessLookupError):  # some end before
            server.signal(signal.SIGTERM)
        server.ended()


class TestRuns:
    """A training run whose reward is somewhere else."""

    RUN = ("train", "-c", "mixture", "run_name=x", "train.epochs=4", "sample.num_prompts=2", "eval.num_prompts=4")
    MORE = ("log.trackers=[]", "log.record_every=0", "rewards=none", "rewards.mine.retries=1", "rewards.mine.timeout=5")

    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "served.py").write_text(SERVED)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("ARBORL_REWARD_TOKEN", TOKEN)
        return tmp_path

    def run(self, *more: str) -> int | str | None:
        with pytest.raises(SystemExit) as stopped:
            main([*self.RUN, *self.MORE, *more])
        return stopped.value.code

    def rows(self, here: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (here / "runs" / "x" / "metrics.jsonl").read_text().splitlines()]

    def test_is_the_run_with_the_reward_at_home(self, here: Path):
        with served("brightness", here) as url:
            assert self.run(f"rewards.mine.url={url}") == 0
        away = self.rows(here)
        shutil.rmtree(here / "runs")
        assert self.run("rewards.mine.fn=brightness") == 0
        for there, home in zip(away, self.rows(here), strict=True):
            if "reward" in there:
                assert there["reward"] == pytest.approx(home["reward"], abs=1e-3), "8 bits a channel"
                assert there["rewards/mine/failed"] == 0

    def test_goes_on_with_the_other_server_when_one_dies(self, here: Path):
        with served("served:mortal", here, calls=7) as first, served("served:mortal", here) as second:
            assert self.run(f"rewards.mine.url=[{first},{second}]", "rewards.mine.batch_size=4") == 0
        found = self.rows(here)
        assert [row["epoch"] for row in found] == [0, 1, 2, 3, 4]
        assert all(row["rewards/mine/failed"] == 0 for row in found[:-1])

    def test_stops_with_a_line_when_none_is_left_and_goes_on_later(self, here: Path, capsys: Any):
        with served("served:mortal", here, calls=9) as url:
            assert self.run(f"rewards.mine.url={url}") == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert [line for line in lines if line.startswith("error")] == lines[-1:]
        assert re.match(r"error: rewards.mine: failed on \d+ of the 32 leaves of epoch \d+ \(http:", lines[-1])
        assert "does not answer (Connection refused)" in lines[-1]
        assert re.search(r"[1-3] epochs saved. To go on: arborl train --resume runs/x", lines[-2])
        before = len(self.rows(here))
        with (
            served("served:mortal", here, port=int(url.rpartition(":")[2])) as url,
            pytest.raises(SystemExit) as stopped,
        ):
            main(["train", "--resume", "runs/x", f"rewards.mine.url={url}"])
        assert stopped.value.code == 0
        found = self.rows(here)
        assert len(found) > before
        assert [row["epoch"] for row in found] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("problem", ["nobody", "token"])
    def test_is_not_begun_without_its_reward(self, here: Path, capsys: Any, monkeypatch: Any, problem: str):
        with served("brightness", here) as url:
            if problem == "token":
                monkeypatch.setenv("ARBORL_REWARD_TOKEN", "wrong")
            else:
                url = f"http://127.0.0.1:{free_port()}"
            assert self.run(f"rewards.mine.url={url}") == 2
        told = capsys.readouterr().err.strip()
        assert len(told.splitlines()) == 1
        said = (
            "refuses the token; try: the server's token in $ARBORL_REWARD_TOKEN"
            if problem == "token"
            else "does not answer"
        )
        assert said in told
        assert f"rewards.mine.url={url}" in told
        assert not (here / "runs").exists()
