"""Environment workers: steps of many environments at once, with a time limit each, while the caller generates."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from meshkit.algos.environments._protocol import Environment, Observation
from meshkit.core.workers import CallFailed, Workers

Stepped = tuple[Environment, Observation]


class EnvironmentPool:
    """Calls environments without waiting for them.

    workers: processes, to which an environment is sent for each step and from which it comes back, so any of them can do the
    next one; a step that takes longer than `timeout_s`, or kills its process, ends its episode alone. 0: the caller itself,
    at once and without a limit. Methods that are `async` all run at the same time in a thread of their own, with the limit.
    """

    def __init__(self, *, workers: int = 0, timeout_s: float = 10.0) -> None:
        self._count, self._timeout_s = workers, timeout_s

    def call(self, environment: Environment, method: str, *arguments: object) -> Future[Stepped]:
        """(the environment afterwards, what it observed). The future raises what went wrong."""
        if inspect.iscoroutinefunction(getattr(environment, method)):
            return asyncio.run_coroutine_threadsafe(
                _awaited(environment, method, arguments, self._timeout_s), self._loop
            )
        call = (environment, method, arguments)
        if self._count:
            return self._workers.submit(call)
        future: Future[Stepped] = Future()
        try:
            future.set_result(_called(call))
        except (Exception, SystemExit) as error:
            future.set_exception(CallFailed(f"{type(error).__name__}: {error}"))
        return future

    def close(self) -> None:
        """Kill the workers, and end the thread."""
        if "_workers" in vars(self):
            self._workers.close()
        if "_loop" in vars(self):
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @cached_property
    def _workers(self) -> Workers:
        return Workers(_called, count=self._count, timeout_s=self._timeout_s)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, daemon=True)
        self._thread.start()
        return loop


def reason_of(error: BaseException, environment: Environment) -> str:
    """Of an episode that failed, for people; its first words are a kind of `Unscored`."""
    name = type(environment).__name__
    if isinstance(error, TimeoutError):
        return f"timed out: {name}: no step {error}"
    return f"raised: {name}: {error}"


def _called(call: tuple[Environment, str, tuple[Any, ...]]) -> Stepped:
    environment, method, arguments = call
    return environment, _checked(getattr(environment, method)(*arguments))


async def _awaited(environment: Environment, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Stepped:
    try:
        async with asyncio.timeout(timeout_s):
            return environment, _checked(await getattr(environment, method)(*arguments))
    except TimeoutError:
        raise TimeoutError(f"within {timeout_s} s") from None
    except Exception as error:
        raise CallFailed(f"{type(error).__name__}: {error}") from None


def _checked(returned: object) -> Observation:
    if not isinstance(returned, Observation):
        raise TypeError(f"it returned {returned!r}. Return an Observation")
    return returned
