"""Weights come whole to nodes without a common process group: in a pipeline, and round nodes that die or lie."""

from __future__ import annotations

import filecmp
import json
import runpy
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from meshkit import init_weights
from meshkit.algos.shardcast import Manifest, Origin, Relay
from meshkit.algos.shardcast._serve import Server
from meshkit.algos.shardcast._store import Store
from meshkit.algos.shardcast.command import RelayOptions, command
from meshkit.errors import CheckpointError
from meshkit.models import Llama, load_pretrained, save_pretrained
from tests.tiny import tiny_config
from tests.world import fork

SHARD = 1000
HOST = "127.0.0.1"
QUICK = {"host": HOST, "poll_s": 0.02, "timeout_s": 5.0}


def write_model(folder: Path, seed: int = 0) -> Path:
    """Files that no shard's size divides, one empty, one in a folder: 12 shards."""
    draw = np.random.default_rng(seed)
    for name, size in {"a.safetensors": 5003, "b/c.safetensors": 6001, "config.json": 17, "empty": 0}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw.bytes(size))
    return folder


def assert_same(found: Path, expected: Path) -> None:
    names = sorted(path.relative_to(expected).as_posix() for path in expected.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file())
    assert filecmp.cmpfiles(found, expected, names, shallow=False) == (names, [], [])


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def at(port: int | None) -> str:
    return f"http://{HOST}:{port}"


class Slow:
    """A trainer's node whose shards come one by one, when the test says so."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.store = model, Store(folder)
        self.manifest = Manifest.of(model, 1, shard_bytes=SHARD, secret="")
        self.store.begin(self.manifest)
        self.server = Server(self.store, HOST, 0)
        self.given = 0

    def give(self, count: int) -> None:
        for shard in range(self.given, self.given + count):
            self.store.write(1, shard, self.manifest.read(self.model, shard))
        self.given += count


def test_a_relay_serves_each_shard_before_the_next_has_come(tmp_path: Path) -> None:
    """Two hops: what the trainer has given so far is at the far end, and the rest is not there yet."""
    slow = Slow(tmp_path / "slow", write_model(tmp_path / "model"))
    relays = [Relay([at(slow.server.port)], tmp_path / "near", port=0, **QUICK)]
    relays.append(Relay([at(relays[0].port)], tmp_path / "far", port=0, **QUICK))
    for shard in range(12):
        slow.give(1)
        url = f"{at(relays[1].port)}/1/shards/{shard}"
        until(lambda: bool(relays[1].upstreams.received))
        with urllib.request.urlopen(url, timeout=30) as response:
            assert slow.manifest.holds(shard, response.read())
        assert sum(relays[1].upstreams.received.values()) == min((shard + 1) * SHARD, 11021)
    for relay in relays:
        version, folder = relay.wait(timeout_s=30)
        assert version == 1
        assert_same(folder, slow.model)
        relay.close()
    slow.server.close()


def relay_process(upstream: str, folder: Path, port_file: Path) -> None:
    relay = Relay([upstream], folder, port=0, **QUICK)
    port_file.with_suffix(".new").write_text(str(relay.port))
    port_file.with_suffix(".new").rename(port_file)
    time.sleep(600)


def test_a_relay_that_is_killed_is_gone_round_and_no_shard_comes_twice(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "slow", write_model(tmp_path / "model"))
    process = fork(relay_process, at(slow.server.port), tmp_path / "relay", tmp_path / "port", daemon=True)
    until((tmp_path / "port").exists)
    relay = at(int((tmp_path / "port").read_text()))
    with Relay([relay, at(slow.server.port)], tmp_path / "engine", streams=1, **QUICK) as engine:
        slow.give(5)
        until(lambda: engine.upstreams.received[relay] == 5 * SHARD)
        process.kill()
        process.join()
        slow.give(7)
        _, folder = engine.wait(timeout_s=60)
        assert_same(folder, slow.model)
        # Between the kill and the fifth shard the relay may have passed on no more: what it lacked came from the trainer.
        assert engine.upstreams.received[at(slow.server.port)] == 11021 - 5 * SHARD
        assert engine.upstreams.failed[relay] > 0
    slow.server.close()


def test_a_wrong_byte_is_seen_by_the_checksum_and_its_sender_gone_round(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with Origin(host=HOST, shard_bytes=SHARD) as origin:
        manifest = origin.publish(model, 3)
        bad = write_model(tmp_path / "bad")
        with (bad / "b/c.safetensors").open("r+b") as stream:
            stream.seek(4000)
            stream.write(b"\0\0\0\0")
        store = Store()
        store.publish(manifest, bad)
        liar = Server(store, HOST, 0)
        with Relay([at(liar.port), at(origin.port)], tmp_path / "engine", streams=1, **QUICK) as engine:
            version, folder = engine.wait(timeout_s=30)
            assert version == 3
            assert_same(folder, model)
            assert engine.upstreams.failed == {at(liar.port): 1}  # and asked last from then on
            assert engine.upstreams.received[at(origin.port)] == 11021 - 9 * SHARD
        liar.close()


def test_a_manifest_that_is_not_the_origins_is_refused(tmp_path: Path) -> None:
    with Origin(host=HOST, shard_bytes=SHARD) as forger, Origin(host=HOST, shard_bytes=SHARD, secret="s") as origin:
        forger.publish(write_model(tmp_path / "other", 1), 2)
        refused = pytest.raises(CheckpointError, match="version 2 is not signed by the secret")
        with Relay([at(forger.port)], tmp_path / "engine", secret="s", **QUICK) as engine, refused:
            engine.wait(timeout_s=0.5)
        origin.publish(write_model(tmp_path / "model"), 2)
        with Relay([at(forger.port), at(origin.port)], tmp_path / "engine", secret="s", **QUICK) as engine:
            assert_same(engine.wait(timeout_s=30)[1], tmp_path / "model")
    manifest = Manifest.of(tmp_path / "model", 1, shard_bytes=SHARD, secret="")
    for text, match in (
        (manifest.to_json().replace("config.json", "../config.json"), "names files outside of its folder"),
        (manifest.to_json().replace("config.json", "/config.json"), "names files outside of its folder"),
        (manifest.to_json().replace("5003", "50030"), "other shards than its files make"),
        ("[]", "no manifest"),
    ):
        with pytest.raises(CheckpointError, match=match):
            Manifest.from_json(text, secret="")


def test_the_newest_version_comes_and_old_ones_go(tmp_path: Path) -> None:
    with Origin(host=HOST, shard_bytes=SHARD, keep=1) as origin:
        origin.publish(write_model(tmp_path / "1", 1), 1)
        with Relay([at(origin.port)], tmp_path / "engine", keep=2, **QUICK) as engine:
            assert engine.wait(timeout_s=30)[0] == 1
            for number in (2, 4, 5):
                origin.publish(write_model(tmp_path / str(number), number), number)
                version, folder = engine.wait(newer_than=number - 1, timeout_s=30)
                assert version == number
                assert_same(folder, tmp_path / str(number))
            until(
                lambda: sorted(path.name for path in (tmp_path / "engine").glob("*[0-9]")) == ["version-4", "version-5"]
            )
        with pytest.raises(CheckpointError, match="version 5 is not newer than 5, which receivers have. Count up."):
            origin.publish(tmp_path / "1", 5)
        # Started again, it has what it had, also where nobody else lives.
        with Relay([at(1)], tmp_path / "engine", **QUICK) as engine:
            assert engine.wait(timeout_s=5)[0] == 5
            with pytest.raises(CheckpointError, match=r"no version newer than 5 in 0 s: OSError: http://127.0.0.1:1: "):
                engine.wait(newer_than=5, timeout_s=0.3)


def test_a_restarted_relay_gets_only_what_it_lacks(tmp_path: Path) -> None:
    slow = Slow(tmp_path / "slow", write_model(tmp_path / "model"))
    slow.give(8)
    engine = Relay([at(slow.server.port)], tmp_path / "engine", streams=1, **QUICK)
    until(lambda: engine.upstreams.received.total() == 8 * SHARD)
    engine.close()
    slow.give(4)
    with Relay([at(slow.server.port)], tmp_path / "engine", streams=1, **QUICK) as again:
        assert_same(again.wait(timeout_s=30)[1], slow.model)
        assert again.upstreams.received.total() == 11021 - 8 * SHARD
    slow.server.close()


def command_line_relay(arguments: list[str], out: Path) -> None:
    with out.open("w") as stream:
        sys.stdout = sys.stderr = stream
        sys.argv = ["meshkit", "relay", *arguments]
        runpy.run_module("meshkit", run_name="__main__")


def test_a_chain_of_relays_in_processes_of_their_own_ends_in_a_model_that_answers_alike(tmp_path: Path) -> None:
    model, shape = Llama(tiny_config()), tiny_config()
    init_weights(model, seed=3)
    save_pretrained(model, shape, tmp_path / "model")
    (tmp_path / "secret").write_text("s\n")
    with Origin(host=HOST, shard_bytes=SHARD, secret="s") as origin:
        origin.publish(tmp_path / "model", 1)
        upstream, relays = at(origin.port), []
        for hop in ("first", "second"):
            arguments = ["--host", HOST, "--port", "0", "--secret-file", str(tmp_path / "secret")]
            arguments = [upstream, "--folder", str(tmp_path / hop), *arguments]
            relays.append(fork(command_line_relay, arguments, tmp_path / f"{hop}.txt", daemon=True))
            said = tmp_path / f"{hop}.txt"
            until(lambda said=said: said.exists() and said.read_text().startswith("relay on port "))
            upstream = at(int(said.read_text().split("\n")[0].rpartition(" ")[2]))
        with Relay([upstream], tmp_path / "engine", secret="s", **QUICK) as engine:
            _, folder = engine.wait(timeout_s=60)
        for relay in relays:
            relay.kill()
            relay.join()
    found = Llama(tiny_config())
    load_pretrained(found, folder)  # which looks at the digests that the folder brings along
    ids = torch.arange(12).view(1, 12) % 32
    assert torch.equal(found(ids), model(ids))


@contextmanager
def liar(versions: str, **lies: object) -> Iterator[str]:
    """The address of a node that says it has these versions, of a manifest with these fields, and no shard."""
    manifest = {"version": 9, "files": [["a", 3]], "shard_bytes": 64, "shards": ["0"], "signature": ""} | lies

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = {"/versions": versions, "/9/manifest": json.dumps(manifest)}.get(self.path)
            self.send_response(404 if said is None else 200)
            self.end_headers()
            self.wfile.write((said or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield at(server.server_address[1])
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("secret", ["", "between us"])
@pytest.mark.parametrize(
    ("versions", "lies"),
    [
        ("[999]", {}),  # of which nobody has the manifest
        ("[9]", {}),  # a shard that nobody has
        (str(list(range(1000, 100_000))), {}),
        ("[Infinity]", {}),
        ("[" * 100_000, {}),
        ('{"a": 1}', {}),
        ("[9]", {"version": 3}),
        ("[9]", {"signature": "\u00e9"}),
        ("[9]", {"signature": "\ud800"}),
        ("[9]", {"shard_bytes": float("inf")}),
        ("[9]", {"files": [["a", 10**30]], "shard_bytes": 10**30}),
        ("[9]", {"files": [["a\0", 3]]}),
        ("[9]", {"files": [["\ud800", 3]]}),
        ("[9]", {"files": [["", 3]]}),
    ],
)
def test_whatever_a_node_says_that_lies_the_right_version_comes(
    tmp_path: Path, secret: str, versions: str, lies: dict[str, object]
) -> None:
    with liar(versions, **lies) as wrong, Origin(host=HOST, shard_bytes=SHARD, secret=secret) as origin:
        origin.publish(write_model(tmp_path / "model"), 1)
        with Relay([wrong, at(origin.port)], tmp_path / "to", secret=secret, **QUICK) as relay:
            version, folder = relay.wait(timeout_s=30)
            assert version == 1
            assert_same(folder, tmp_path / "model")


def test_what_a_crash_left_of_a_whole_version_comes_again(tmp_path: Path) -> None:
    """A file cut off, as by a full disk; a manifest cut off; and files without a manifest."""
    with Origin(host=HOST, shard_bytes=SHARD) as origin:
        origin.publish(write_model(tmp_path / "model"), 1)
        for breaks in (
            lambda: (tmp_path / "to/version-1/a.safetensors").write_bytes(b"cut"),
            lambda: (tmp_path / "to/version-1.json").write_text('{"version": 1, "fi'),
            lambda: (tmp_path / "to/version-1.json").unlink(),
            lambda: None,
        ):
            with Relay([at(origin.port)], tmp_path / "to", **QUICK) as relay:
                _, folder = relay.wait(timeout_s=30)
                assert_same(folder, tmp_path / "model")
            breaks()


def test_a_relay_that_could_get_nothing_is_refused(tmp_path: Path) -> None:
    for upstream in ("trainer:8000", "http://", "http://trainer:99999", "trainer"):
        with pytest.raises(CheckpointError, match=f"'{upstream}' is no address of a node"):
            Relay([upstream], tmp_path)
    for wrong in ({"keep": 0}, {"streams": 0}, {"poll_s": 0.0}, {"timeout_s": 0.0}):
        with pytest.raises(CheckpointError, match="each is positive"):
            Relay(["http://trainer:8000"], tmp_path, **wrong)
    with pytest.raises(CheckpointError, match="port=70000"):
        Relay(["http://trainer:8000"], tmp_path, port=70000)
    with Origin(host=HOST) as origin, pytest.raises(CheckpointError, match="version -1 is not newer than -1"):
        origin.publish(write_model(tmp_path / "model"), -1)


def test_a_secret_file_without_a_secret_is_refused(tmp_path: Path) -> None:
    for content in (b"\n", b"\xff\xfe"):
        (tmp_path / "secret").write_bytes(content)
        options = RelayOptions(upstreams=("http://trainer:8000",), folder=tmp_path, secret_file=tmp_path / "secret")
        with pytest.raises(CheckpointError, match="it has no text, so nothing would be checked"):
            command(options)
