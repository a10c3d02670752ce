"""Reference tasks for reinforcement learning with verifiable rewards, and for environments: addition, reversal, countdown,
calculator, guessing. No download.

A row has `prompt` and `completion` (a right answer) and what its verifier needs. Rows depend on the arguments alone. A
row is held out by a hash of its name. Rows that differ only in the order of equal parts have the same name: 12+34 is never
learnt while 34+12 is held out.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator

from meshkit.data.records import Record
from meshkit.data.tasks.standard_library import TaskSplits
from meshkit.data.text.preparation import is_held_out
from meshkit.errors import DataError

REFERENCE_ALPHABET = string.digits + string.ascii_lowercase + "+-*()=>, "
"""every character of these tasks, for `character_tokenizer`"""


def addition_tasks(*, digits: int = 2, count: int = 20_000, held_out: float = 0.05, seed: int = 0) -> TaskSplits:
    """`17+5=` and `22`: two numbers of at most `digits` digits.

    Raises: DataError for sizes that make no tasks. So do the others.
    """
    _refuse(digits >= 1, f"digits={digits}: a number has at least 1 digit")

    def draw(generator: random.Random) -> tuple[str, Record]:
        a, b = (generator.randrange(10**digits) for _ in range(2))
        low, high = sorted((a, b))
        return f"addition {low}+{high}", Record(
            fields={"prompt": f"{a}+{b}=", "completion": str(a + b)}, source=f"addition:{a}+{b}"
        )

    return _splits(draw, count, held_out, seed)


def reversal_tasks(
    *, shortest: int = 4, longest: int = 8, count: int = 20_000, held_out: float = 0.05, seed: int = 0
) -> TaskSplits:
    """`abcd>` and `dcba`: `shortest` to `longest` letters, each length as often."""
    _refuse(1 <= shortest <= longest, f"shortest={shortest}, longest={longest}: no such lengths")

    def draw(generator: random.Random) -> tuple[str, Record]:
        length = generator.randint(shortest, longest)
        text = "".join(generator.choice(string.ascii_lowercase) for _ in range(length))
        # A word and its reversal are each other's answers: both are in the same half.
        return f"reversal {min(text, text[::-1])}", Record(
            fields={"prompt": f"{text}>", "completion": text[::-1]}, source=f"reversal:{text}"
        )

    return _splits(draw, count, held_out, seed)


def countdown_tasks(
    *, numbers: int = 3, largest: int = 20, count: int = 20_000, held_out: float = 0.05, seed: int = 0
) -> TaskSplits:
    """`3,7,5>26` and then `=`: an expression of some of the numbers, each at most once, that gives the target, `3*7+5`.

    Rows have `numbers` and `target`, from 1 to 99, as well. Any such expression is right; `completion` is the one that the
    target was made of, which uses all numbers.
    """
    _refuse(numbers >= 2 and largest >= 1, f"numbers={numbers}, largest={largest}: too few")

    def draw(generator: random.Random) -> tuple[str, Record] | None:
        values = [generator.randint(1, largest) for _ in range(numbers)]
        # In another order than they are shown in, so the answer is not the prompt with signs between.
        order = generator.sample(values, numbers)
        operators = [generator.choice("+-*") for _ in order[1:]]
        target = _value(order, operators)
        if not 0 < target < 100:
            return None
        expression = str(order[0]) + "".join(f"{sign}{n}" for sign, n in zip(operators, order[1:], strict=True))
        shown = ",".join(map(str, values))
        return f"countdown {sorted(values)} {target}", Record(
            fields={
                "prompt": f"{shown}>{target}=",
                "completion": expression,
                "numbers": values,
                "target": target,
            },
            source=f"countdown:{shown}>{target}",
        )

    return _splits(draw, count, held_out, seed)


def calculator_tasks(
    *, digits: int = 2, count: int = 20_000, held_out: float = 0.05, seed: int = 0, demonstrations: int = 1
) -> TaskSplits:
    """`47*83>` and `3901`: products for the environment `Calculator`, which computes them when asked by `=47*83`.

    demonstrations: episodes in a row, turns and what is answered to them: a few ask, the others say any number.
    """
    _refuse(digits >= 1, f"digits={digits}: a number has at least 1 digit")

    def draw(generator: random.Random) -> tuple[str, Record]:
        a, b = (generator.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        low, high = sorted((a, b))
        asked, product = [f"={a}*{b}", f"={a * b}>", str(a * b)], str(a * b)
        guessed = [
            [str(generator.randrange(10 ** (len(product) - 1), 10 ** len(product)))] for _ in range(demonstrations)
        ]
        shown = [asked if generator.random() < 0.3 else guess for guess in guessed]
        return f"calculator {low}*{high}", Record(
            fields={"prompt": f"{a}*{b}>", "completion": product, "demonstrations": shown}, source=f"calculator:{a}*{b}"
        )

    return _splits(draw, count, held_out, seed)


def guessing_tasks(
    *, count: int = 20_000, held_out: float = 0.05, seed: int = 0, demonstrations: int = 16, turns: int = 4
) -> TaskSplits:
    """`c-q>` and a `secret` letter of that range, of 8 to 15, for the environment `GuessingGame`; at most 1,384 rows.

    demonstrations: episodes in a row, turns and what is answered to them, of somebody who half the time forgets.
    """
    letters = string.ascii_lowercase

    def draw(generator: random.Random) -> tuple[str, Record]:
        size = generator.randint(8, 15)
        low = generator.randrange(len(letters) - size + 1)
        secret = letters[generator.randrange(low, low + size)]
        prompt = f"{letters[low]}-{letters[low + size - 1]}>"
        shown = [_guesses(low, low + size - 1, letters.index(secret), generator, turns) for _ in range(demonstrations)]
        return f"guessing {prompt}{secret}", Record(
            fields={"prompt": prompt, "secret": secret, "demonstrations": shown}, source=f"guessing:{prompt}{secret}"
        )

    return _splits(draw, count, held_out, seed)


def _guesses(low: int, high: int, secret: int, generator: random.Random, turns: int) -> list[str]:
    first, last, said = low, high, list[str]()
    for _ in range(turns):
        forgets = generator.random() < 0.5
        guess = generator.randint(low, high) if forgets else generator.randint(first, last)
        later = secret > guess
        said += [string.ascii_lowercase[guess], "+" if later else "-"]
        if guess == secret:
            break
        first, last = (max(first, guess + 1), last) if later else (first, min(last, guess - 1))
    return said[:-1]  # nobody reads what ends an episode


def _value(numbers: list[int], operators: list[str]) -> int:
    """Products first, as the expression reads."""
    terms, signs = [numbers[0]], [1]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number)
            signs.append(1 if operator == "+" else -1)
    return sum(sign * term for sign, term in zip(signs, terms, strict=True))


def _refuse(is_valid: bool, problem: str) -> None:
    if not is_valid:
        raise DataError(f"{problem}, which makes no tasks. Give sizes that do.")


def _splits(
    draw: Callable[[random.Random], tuple[str, Record] | None], count: int, held_out: float, seed: int
) -> TaskSplits:
    _refuse(count >= 1, f"count={count}: too few")
    if not 0 < held_out < 1:
        raise DataError(f"held_out={held_out}: not a part of the tasks. Give a number between 0 and 1.")
    halves: tuple[list[Record], list[Record]] = ([], [])
    for name, record in _distinct(draw, count, random.Random(seed)):
        halves[is_held_out(name, held_out)].append(record)
    return TaskSplits(train=halves[0], held_out=halves[1])


def _distinct(
    draw: Callable[[random.Random], tuple[str, Record] | None], count: int, generator: random.Random
) -> Iterator[tuple[str, Record]]:
    """Up to `count` tasks, each prompt once; fewer where a hundred draws in a row find nothing new."""
    seen: set[str] = set()
    fruitless = 0
    while len(seen) < count and fruitless < 100:
        task = draw(generator)
        fruitless += 1
        # By the prompt and not by the name: 12+34 and 34+12 are two rows, of one half.
        if task is not None and task[1].source not in seen:
            fruitless = 0
            seen.add(task[1].source)
            yield task
