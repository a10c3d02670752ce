"""`python -m meshkit relay`: a relay of shardcast in a process of its own, at a site or beside engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from meshkit.algos.shardcast._nodes import Relay
from meshkit.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """Get each newest version of a model from other nodes, keep it in --folder, and serve its shards on while the rest comes.

    Prints a line for each version: its number and its folder, which an engine then loads.
    """

    upstreams: Annotated[Positional[tuple[str, ...]], arg(metavar="http://HOST:PORT")]
    """the nearest first, the origin last"""
    folder: Path
    port: int = 8000
    """0 takes a free one"""
    host: str = ""
    """address to serve at; default: all of this machine's"""
    keep: int = 2
    """versions; older ones are deleted"""
    secret_file: Path | None = None
    """the secret with which the origin signs manifests; others are then refused"""
    until: int | None = None
    """end after this version; default: never"""


def command(options: RelayOptions) -> None:
    secret = "" if options.secret_file is None else read_secret(options.secret_file, verb="relay")
    with Relay(
        options.upstreams, options.folder, host=options.host, port=options.port, keep=options.keep, secret=secret
    ) as relay:
        print(f"relay on port {relay.port}", flush=True)
        version = -1
        while options.until is None or version < options.until:
            try:
                version, folder = relay.wait(newer_than=version, timeout_s=60.0)
            except CheckpointError:
                if relay.trouble:
                    print(f"no newer version: {relay.trouble}", flush=True)
                continue
            print(f"version {version} in {folder}", flush=True)


def read_secret(path: Path, *, verb: str) -> str:
    """The text of a file. Raises: CheckpointError for one that is not there, or has none."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{verb}: there is no file {path}. Write the secret into it.") from None
    except (UnicodeDecodeError, OSError):
        secret = ""
    if not secret:
        raise CheckpointError(
            f"{verb} --secret-file {path}: it has no text, so nothing would be checked. Write the secret."
        )
    return secret
