"""Weights to generators in other jobs or sites (SHARDCAST): checksummed shards over HTTP, relayed in a pipeline."""

from ._manifest import Manifest as Manifest
from ._nodes import Origin as Origin
from ._nodes import Relay as Relay
from ._nodes import fetch as fetch
from ._serve import QuietServer as QuietServer
