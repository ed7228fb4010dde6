"""Stand-alone proxies: killed and started again, several behind one address."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from occamy.capture.router import owner
from occamy.capture.store import Store
from occamy.capture.worker import taken

ASK = {"role": "user", "content": "set tier of A01 to gold"}
GET = 'crm_get{"id":"A01"}<end>'
Ids = Callable[[str], list[int]]


class Service:
    """A running `occamy proxy serve`."""

    def __init__(self, folder: Path, tokenizer: Path, engine: str, port: int, workers: int) -> None:
        command = [sys.executable, "-m", "occamy.cli.main", "proxy", "serve", "--folder", str(folder)]
        command += ["--tokenizer", str(tokenizer), "--engine", engine, "--context-limit", "256"]
        command += ["--port", str(port), "--workers", str(workers)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        assert told.startswith("recording proxy: "), told
        self.url = told.split()[-1]
        self.admin_key = (folder / "admin.key").read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def serve(tmp_path: Path, tokenizer_dir: Path, engine: Any) -> Iterator[Callable[..., Service]]:
    running: list[Service] = []

    def start(port: int = 0, workers: int = 1) -> Service:
        running.append(Service(tmp_path, tokenizer_dir, engine.url, port, workers))
        return running[-1]

    yield start
    for service in running:
        service.kill()


@pytest.fixture
def opened(connect: Any) -> Callable[..., Any]:
    """Return a function that opens an episode over HTTP and returns its client."""

    def open_(service: Service, episode: str) -> Any:
        admin = connect(service, key=service.admin_key)
        admin.base = "/admin/episodes/"
        status, answer = admin.send("POST", episode, {"seed": 1})
        assert status == 201, answer
        return connect(service, episode, key=answer["api_key"])

    return open_


def _admin(connect: Any, service: Service) -> Any:
    admin = connect(service, key=service.admin_key)
    admin.base = ""
    return admin


def _result(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}


def test_a_killed_proxy_started_again_goes_on_with_its_episodes(
    serve: Any, opened: Any, connect: Any, engine: Any, ids: Ids, tmp_path: Path
) -> None:
    engine.script = [(ids(GET), "stop")] * 2 + [(ids("done<end>"), "stop")]
    service = serve()
    client = opened(service, "e")
    message = client.chat([ASK])[1]["choices"][0]["message"]
    history = [ASK, message, _result(message)]
    engine.release, engine.arrived = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(client.chat, history)
        assert engine.arrived.wait(20)
        service.kill()
        with pytest.raises((http.client.HTTPException, OSError)):
            lost.result(20)
    engine.release.set()
    again = serve(port=int(service.url.rsplit(":", 1)[1]))
    assert client.chat(history)[1]["choices"][0]["message"]["content"] == "done"
    admin = _admin(connect, again)
    state = admin.send("GET", "/admin/episodes/e")[1]
    assert [(t["ordinal"], t["attempt"], t["class"]) for t in state["turns"]] == [(0, 0, "start"), (1, 0, "continue")]
    assert state["quarantine"] is None
    assert admin.send("POST", "/admin/episodes/e/close")[0] == 200
    assert again.stop() == 0
    (segment,) = Store(tmp_path / "capture.sqlite").captured("e").segments
    prompt = ids("<user>set tier of A01 to gold<assistant>")
    assert segment.tokens.tolist() == prompt + ids(GET) + ids("<tool>ok<assistant>done<end>")


def test_workers_share_an_address_and_a_killed_one_is_started_again(
    serve: Any, opened: Any, connect: Any, engine: Any, ids: Ids, tmp_path: Path
) -> None:
    engine.script = [(ids(GET), "stop")] * 40
    service = serve(workers=2)
    names = [f"e{i}" for i in range(8)]
    clients = [opened(service, name) for name in names]
    first = [client.chat([ASK])[1]["choices"][0]["message"] for client in clients]
    admin = _admin(connect, service)
    assert sorted(admin.send("GET", "/admin/episodes")[1]["episodes"]) == names
    assert admin.send("GET", "/healthz") == (200, {"status": "ok", "down": []})
    assert 'calls_total{class="start"} 8.0\n' in _metrics(admin)
    assert admin.send("POST", "/admin/pause")[0] == admin.send("POST", "/admin/resume")[0] == 200
    clients[0].key, key = "wrong", clients[0].key
    assert clients[0].chat([ASK])[0] == 401
    clients[0].key = key
    admin.key = "wrong"
    assert admin.send("GET", "/admin/episodes")[0] == admin.send("POST", "/admin/pause")[0] == 401
    admin.key = service.admin_key

    engine.release, engine.arrived = threading.Event(), threading.Event()
    victim = service.children()[0]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(client.chat, [ASK, message, _result(message)])
            for client, message in zip(clients, first, strict=True)
        ]
        while len(engine.seen) < 16:
            assert engine.arrived.wait(20)
        os.kill(victim, signal.SIGKILL)
        engine.release.set()
        assert [answer.result(30)[0] for answer in asked] == [200] * 8
    assert victim not in service.children() and len(service.children()) == 2
    for name in names:
        status, closed = admin.send("POST", f"/admin/episodes/{name}/close")
        assert (status, closed["quarantine"], len(closed["segments"])) == (200, None, 1)
        assert closed["segments"][0]["targets"] == 2 * len(ids(GET))
        worker = owner(name, {"worker-0": "", "worker-1": ""})
        assert len(Store(tmp_path / worker / "capture.sqlite").captured(name).turns) == 2
    assert service.stop() == 0


def _metrics(admin: Any) -> str:
    with closing(admin.request("GET", "/metrics")) as connection:
        return str(connection.getresponse().read().decode())


def test_an_episode_keeps_its_proxy_and_few_move_when_one_is_added() -> None:
    three = {f"worker-{i}": "" for i in range(3)}
    four = three | {"worker-3": ""}
    episodes = [f"episode-{i}" for i in range(400)]
    before, after = [owner(e, three) for e in episodes], [owner(e, four) for e in episodes]
    assert all(100 <= before.count(name) <= 170 for name in three)
    moved = [b for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {"worker-3"} and 70 <= len(moved) <= 130


def _refused(*options: str) -> str:
    command = [sys.executable, "-m", "occamy.cli.main", "proxy", "serve", "--context-limit", "256", "--port", "0"]
    done = subprocess.run([*command, "--engine", "http://127.0.0.1:1", *options], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_a_folder_is_served_by_one_proxy(tmp_path: Path) -> None:
    with (
        taken(tmp_path),
        pytest.raises(RuntimeError, match="served by another proxy"),
        taken(tmp_path, seconds=0.0),
    ):
        pass
    with taken(tmp_path, seconds=0.0):
        pass


def test_what_cannot_be_served_is_said_at_the_start(tmp_path: Path, tokenizer_dir: Path) -> None:
    assert "no single chat template" in _refused("--folder", str(tmp_path), "--tokenizer", str(tmp_path))
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-1").mkdir()
    options = ("--folder", str(tmp_path), "--tokenizer", str(tokenizer_dir), "--workers")
    assert "was served by 2 workers, not 3" in _refused(*options, "3")
    assert "--workers 0" in _refused(*options, "0")
