"""The engine that plays in the environment of a reinforcement learning recipe, in turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshkit.algos.environments import EnvironmentPool, Player, chat_turns
from meshkit.algos.rollout import Engine, KeptCache, generate, has_paged_cache
from meshkit.data import Chat, Tokenizer, load_chat_template
from meshkit.errors import PlanError
from meshkit.models import config_from_pretrained
from meshkit.step import Run

from .environments import environment_of
from .flags import EnvironmentFlags
from .policy import engine_of, records_routing
from .tasks import Tasks


def playing_engine(config: EnvironmentFlags, run: Run, tasks: Tasks, tokenizer: Tokenizer) -> Engine:
    """`engine_of`, and with an environment a `Player` by it, whose cache stays between turns.

    Raises: PlanError for an environment with --routing-replay rollout.
    """
    engine = engine_of(config, run)
    if not tasks.environment:
        return engine
    if records_routing(config):
        raise PlanError(
            "--routing-replay rollout: the turns of an environment do not keep what the generator's routers chose. Use old."
        )
    if config.engine == "meshkit" and has_paged_cache(run):
        engine = partial(generate, run, cache=KeptCache())
    most = config.tokens_per_microbatch
    if config.pretrained is not None:
        most = min(most, getattr(config_from_pretrained(config.pretrained), "max_position_embeddings", most))
    chats = any("messages" in row.fields for row in tasks.train[:1])
    encode: Callable[[str], list[int]] = tokenizer.encode
    if chats and config.pretrained is not None:
        chat = Chat(tokenizer=tokenizer, template=load_chat_template(config.pretrained))
        encode = chat_turns(chat, stop=tokenizer.backend.id_to_token(tokenizer.eos_id) or "")
    return Player(
        mesh=run.mesh,
        engine=engine,
        environment=environment_of(tasks.environment),
        encode=encode,
        turns=tasks.turns,
        pool=EnvironmentPool(workers=config.environment_workers, timeout_s=config.reward_timeout_s),
        groups=config.turn_groups,
        max_tokens=most,
    )
