"""Environments published for the `verifiers` package: one of its `MultiTurnEnv`s as an `Environment`, without a server.

The environment runs its own rollout, in which this policy is the model: a client of `verifiers` that asks it. So prompts,
stop conditions and rubrics are those of the package, whatever a subclass overrides.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from meshkit.algos.environments._protocol import Action, Observation
from meshkit.data import Record
from meshkit.errors import DataError

ROW = ("prompt", "answer", "info", "example_id", "task")
"""what a row of a data set of `verifiers` has"""


def verifiers_rows(environment: Any, *, count: int = -1, seed: int | None = None) -> list[Record]:
    """Rows of an environment's data set, for `encode_prompts` or the recipes: the messages are in `prompt`.

    environment: as `verifiers.load_environment` returns it. count, seed: of `get_dataset`.
    Raises: DataError without the package.
    """
    _refuse_absence()
    rows = environment.get_dataset(n=count, seed=seed)
    return [
        Record(fields={name: row[name] for name in ROW if row.get(name) is not None}, source=f"verifiers row {index}")
        for index, row in enumerate(rows)
    ]


class VerifiersEnvironment:
    """`partial(VerifiersEnvironment, verifiers.load_environment("wordle"))` makes one for each episode.

    The row is one of `verifiers_rows`, perhaps encoded as a chat. What messages say that the environment adds is the text of
    an observation, for an `encode` such as `chat_turns`; the reward, of its rubric, comes with the last turn.
    It has no tool calls: a policy writes text, which an environment must read itself. So `ToolEnv`s end after a turn.
    Raises: DataError without the package, which has this interface up to its version 0.1.
    Source: verifiers, Brown 2025 (github.com/PrimeIntellect-ai/verifiers); checked with 0.1.14.
    """

    def __init__(self, environment: Any) -> None:
        _refuse_absence()
        if not callable(getattr(environment, "rollout", None)):
            raise DataError(
                f"VerifiersEnvironment: {type(environment).__name__} has no rollout. Give what verifiers.load_environment "
                "returns."
            )
        self._environment = environment
        self._read = 0
        """messages that the policy has read or written"""

    async def reset(self, fields: Mapping[str, Any], seed: int) -> Observation:
        row = {name: fields[name] for name in ROW if name in fields}
        row = {"example_id": 0, **row, "prompt": fields.get("messages", fields["prompt"])}
        self._client, self._read = _client(), len(row["prompt"])
        self._task = asyncio.ensure_future(self._environment.rollout(row, self._client, "policy", {}))
        return await self._next()

    async def step(self, action: Action) -> Observation:
        self._client.answers.put_nowait(action)
        self._read += 1
        return await self._next()

    async def _next(self) -> Observation:
        """What the environment asks next, or its reward."""
        asked = asyncio.ensure_future(self._client.asked.get())
        await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            state = await self._task
            if state.get("error") is not None:
                raise RuntimeError(f"the environment ended with {state['error']!r}")
            await self._environment.rubric.score_rollout(state)
            return Observation(reward=float(state["reward"]), done=True)
        messages = asked.result()
        new, self._read = messages[self._read :], len(messages)
        return Observation(text="\n".join(_said(message) for message in new))


def _refuse_absence() -> None:
    if importlib.util.find_spec("verifiers") is None:
        raise DataError('VerifiersEnvironment: verifiers is not installed. `pip install "verifiers<0.2"`.')


def _said(message: Any) -> str:
    content = message["content"] if isinstance(message, Mapping) else message.content
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in parts)


def _client() -> Any:
    """The policy, as the package sees a model."""
    from verifiers.clients import Client  # type: ignore[import-not-found]  # an optional package, heavy to import
    from verifiers.types import Response, ResponseMessage  # type: ignore[import-not-found]

    class Policy(Client):  # type: ignore[misc]  # its one seam for models is this class
        def __init__(self) -> None:
            super().__init__(None)
            self.asked: asyncio.Queue[Any] = asyncio.Queue()
            self.answers: asyncio.Queue[Action] = asyncio.Queue()

        async def get_response(self, prompt: Any, model: str, *rest: Any, **options: Any) -> Any:
            self.asked.put_nowait(prompt)
            action = await self.answers.get()
            reason = "length" if action.truncated else "stop"
            message = ResponseMessage(
                content=action.text, finish_reason=reason, is_truncated=action.truncated, tool_calls=None
            )
            return Response(id="", created=0, model=model, message=message)

        def setup_client(self, config: Any) -> None: ...
        async def to_native_tool(self, tool: Any) -> None: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *rest: Any, **options: Any) -> None: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return Policy()
