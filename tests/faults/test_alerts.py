"""What the watchdog reports reaches a function and a web address once, and a page shows where each rank is."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshkit.errors import PlanError
from meshkit.faults.alerts import ALERT_S, Alert, Alerts
from meshkit.faults.heartbeat import Entry
from meshkit.faults.page import Page
from tests.recipes.launch import run

SCRIPT = "tests/faults/watched.py"
HOOK = """
import json
from dataclasses import asdict
from pathlib import Path

def note(alert):
    with Path({file!r}).open("a") as out:
        out.write(json.dumps(asdict(alert)) + "\\n")

def broken(alert):
    raise RuntimeError("no pager")

def endless(alert):
    import time
    time.sleep(600)

number = 3
"""


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    file = tmp_path / "hook.py"
    file.write_text(HOOK.format(file=str(tmp_path / "said.jsonl")))
    return file


@pytest.fixture
def address() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(where to post, what was posted)"""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/train", posted
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("fault", "kinds"), [("stay", ["stall"]), ("raise", ["error"]), ("own", ["own"])])
def test_a_function_is_told_once(fault: str, kinds: list[str], hook: Path, tmp_path: Path) -> None:
    status, output = run(2, SCRIPT, fault, f"{hook}:note", "", timeout_s=120)
    assert (status == 0) == (fault != "raise"), output
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in said] == kinds, output
    words = {"stay": "rank 1 on", "raise": "this rank has had enough", "own": "the loss is 12.3"}
    assert words[fault] in said[0]["text"]
    assert said[0]["rank"] == (1 if fault == "raise" else 0) and said[0]["host"] and said[0]["job"]
    assert abs(said[0]["time"] - time.time()) < 120


def test_an_address_is_told_and_a_page_shows_who_works(
    address: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    page = tmp_path / "pages" / "status.html"
    status, output = run(2, SCRIPT, "stay", address[0], str(page), timeout_s=120)
    assert status == 0, output
    assert [each["kind"] for each in address[1]] == ["stall"]
    text = page.read_text()
    assert "2 ranks: " in text and "done" in text and "before the first step" in text


@pytest.mark.parametrize(
    ("alert", "said"),
    [
        ("nowhere.py:note", 'give "file.py:function" with a file that exists'),
        ("{hook}:nobody", "has no function 'nobody'"),
        ("{hook}:number", "has no function 'number'"),
        ("ftp://somewhere", "begins with http://"),
    ],
)
def test_a_hook_that_cannot_be_called_is_refused_before_anything_runs(alert: str, said: str, hook: Path) -> None:
    status, output = run(2, SCRIPT, "none", alert.format(hook=hook), "", timeout_s=120)
    assert status != 0
    assert output.count(said) == 1 and 'Traceback (most recent call last):\n  File "tests' not in output, output


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written: .* Give a file in a folder of yours"):
        Page(tmp_path / "file" / "status.html")


def test_a_hook_that_fails_or_hangs_ends_nothing(hook: Path, capfd: pytest.CaptureFixture[str]) -> None:
    broken = Alerts(f"{hook}:broken")
    for _ in range(2):
        broken.send("own", "a", rank=0)
    broken.finish()
    assert capfd.readouterr().err.count("The alert hook") == 1
    endless = Alerts(f"{hook}:endless")
    endless.send("own", "a", rank=0)
    began = time.monotonic()
    endless.finish()
    assert time.monotonic() - began < ALERT_S + 2


def test_an_address_where_nobody_listens_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    alerts = Alerts("http://127.0.0.1:9/")
    alerts.send("own", "a", rank=0)
    alerts.finish()
    assert "failed: URLError" in capfd.readouterr().err


def test_a_function_object_is_a_hook_too() -> None:
    said: list[Alert] = []
    alerts = Alerts(said.append)
    alerts.send("slow", "rank 3 is the slowest", rank=0)
    alerts.finish()
    assert (said[0].kind, said[0].text) == ("slow", "rank 3 is the slowest")


def entry(beat: int, **values: Any) -> Entry:
    return Entry(
        **{"host": "node-1", "pid": 1, "beat": beat, "location": "step 3", "waits": True, "since": 0.0, "now": 2.0}
        | values
    )


def states(text: str) -> dict[int, tuple[str, str]]:
    """(state, share of looks at which it worked), by rank"""
    rows = re.findall(
        r'<td class="n">(\d+)</td><td>[^<]*</td><td>(\w+)</td><td class="n">[^<]*</td><td class="n">(\d+%)</td>', text
    )
    return {int(rank): (state, share) for rank, state, share in rows}


def test_the_page_tells_who_works_waits_is_silent_and_has_failed(tmp_path: Path) -> None:
    page = Page(tmp_path / "status.html")
    for beat in range(4):
        page.write(
            {
                0: entry(beat),
                1: entry(beat, waits=False),
                2: entry(0),  # its heartbeat stands still
                3: entry(beat, left="error", error="ValueError: <b>no</b>"),
                4: None,
                5: entry(beat, left="done"),
                6: entry(beat, waits=beat % 2 == 0),
            },
            patience_s=0.03,
        )
        time.sleep(0.05)
    text = page.file.read_text()
    found = states(text)
    assert {rank: state for rank, (state, _) in found.items()} == {
        0: "waits",
        1: "works",
        2: "silent",
        3: "failed",
        4: "silent",
        5: "done",
        6: "works",
    }
    assert (found[0][1], found[1][1], found[6][1]) == ("0%", "100%", "50%")
    assert list(found)[:3] == [3, 2, 4]  # the worst first
    assert "&lt;b&gt;no" in text and "<b>no" not in text


def test_a_page_of_many_ranks_shows_the_worst(tmp_path: Path) -> None:
    page = Page(tmp_path / "status.html")
    page.write({rank: entry(1, waits=rank != 900) for rank in range(1024)}, patience_s=60)
    text = page.file.read_text()
    assert "1024 ranks: 1 works, 1023 waits" in text and "and 512 more ranks" in text
    assert next(iter(states(text))) == 900
