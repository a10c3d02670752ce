"""`python -m meshkit meeting-place`: where replicas of local updates meet that are jobs of their own."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from meshkit.optim.outer.place._rules import MeetingRules
from meshkit.optim.outer.place._server import PlaceServer


@dataclass(frozen=True, kw_only=True)
class MeetingPlaceOptions:
    """Say who meets, for replicas of local updates that are jobs of their own, until their run has ended.

    Each is started as examples/diloco_pretrain.py --meeting-place HOST:PORT, any number up to --replicas, at any time.
    """

    port: int = 29600
    """to listen on; the next one is used too"""
    replicas: int = 2
    """the most that there may be: the data is cut up for so many"""
    quorum: int = 1
    """the fewest that a meeting has"""
    grace: float = 30.0
    """seconds for which those who are there wait for the others, and that one may say nothing before it counts as gone"""
    exchange: float = 600.0
    """seconds that an exchange may take, or to hand a state on"""
    patience: float = 600.0
    """seconds for which those who are there wait for a quorum, before they end"""


def command(options: MeetingPlaceOptions) -> None:
    rules = MeetingRules(
        replicas=options.replicas,
        quorum=options.quorum,
        grace_s=options.grace,
        exchange_s=options.exchange,
        patience_s=options.patience,
    )
    server = PlaceServer(rules, port=options.port, say=_say)
    _say(f"meeting place on port {server.port}: {rules}")
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    _say("the run has ended" if server.place.over else "the meeting place was ended")


def _say(text: str) -> None:
    """Whoever read it may be gone, or its disk full, or its encoding without a letter: the replicas go on meeting."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # so that the end of the process does not fail either
    except (OSError, ValueError):
        pass
