"""Questions whose answers are computed, never looked up: any size, the same every time."""

from __future__ import annotations

import random
import re
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml


class SmokeQuestion(NamedTuple):
    """What is asked, and what a right answer holds."""

    prompt: str
    want: str

    def is_right(self, text: str) -> bool:
        """Whether the last number of a text is the wanted one; models explain before it."""
        numbers = re.findall(r"-?\d+", re.sub(r"(?<=\d)[,_\s](?=\d{3}\b)", "", text))
        return bool(numbers) and numbers[-1] == self.want

    def mistake(self, text: str) -> str:
        """How a text is wrong; empty where it is right."""
        return "" if self.is_right(text) else f"{self.prompt!r} is {self.want}, not {text[-120:]!r}"

    def is_held(self, text: str) -> bool:
        """Whether the wanted numbers are in a text, one after the other, however separated."""
        return self.want in ", ".join(re.findall(r"\d+", text))


class Language(Frozen):
    """How a language counts to five, and the scripts it is written in."""

    name: str
    words: tuple[str, ...]
    scripts: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """Asks for the words."""
        return (
            f"Write the numbers from 1 to 5 as words in {self.name}, separated by commas."
            " Write nothing else."
        )


class _Tool(Frozen):
    name: str
    description: str
    properties: dict[str, Any]


class Scenario(Frozen):
    """A request, and the one call that it must lead to."""

    prompt: str
    tool: str
    arguments: dict[str, Any]


class _Words(Frozen):
    """`tasks.yaml`: what questions are made of."""

    languages: tuple[Language, ...]
    people: tuple[str, ...]
    things: tuple[str, ...]
    names: tuple[str, ...]
    spoken: tuple[str, ...]
    towns: tuple[str, ...]
    filler: tuple[str, ...]
    tools: tuple[_Tool, ...]
    scenarios: tuple[Scenario, ...]


_WORDS = read_yaml(Path(__file__).with_name("tasks.yaml"), _Words)
LANGUAGES = _WORDS.languages


def sums(count: int, seed: int = 1) -> list[SmokeQuestion]:
    """Small sums and products."""
    dice = random.Random(seed)  # noqa: S311 - the same questions every time, nothing secret
    questions = []
    for number in range(count):
        a, b = dice.randint(12, 89), dice.randint(12, 89)
        if number % 3 == 2:
            b = dice.randint(3, 9)
        sign, want = (("+", a + b), ("-", a - b), ("*", a * b))[number % 3]
        questions.append(_sum(f"{a} {sign} {b}", want))
    return questions


def additions(count: int, seed: int = 5) -> list[SmokeQuestion]:
    """Sums whose questions all have the same length."""
    dice = random.Random(seed)  # noqa: S311
    pairs = [(dice.randint(12, 89), dice.randint(12, 89)) for _ in range(count)]
    return [_sum(f"{a} + {b}", a + b) for a, b in pairs]


def _sum(expression: str, want: int) -> SmokeQuestion:
    return SmokeQuestion(f"What is {expression}? Answer with the number only.", str(want))


def word_problems(count: int, seed: int = 2) -> list[SmokeQuestion]:
    """School problems of three steps, as GSM8K has them: kernels that are a little wrong show here.

    A model that got 0.89 elsewhere got 0.46–0.52: local-inference-lab/rtx6kpro#61.
    """
    dice = random.Random(seed)  # noqa: S311
    questions = []
    for number in range(count):
        who, what = _WORDS.people[number % 6], _WORDS.things[number * 5 % 6]
        boxes, each = dice.randint(3, 9), dice.randint(4, 12)
        gives, gets = dice.randint(2, 11), dice.randint(3, 20)
        prompt = (
            f"{who} has {boxes} boxes with {each} {what} each. {who} gives away {gives} {what}"
            f" and then buys {gets} {what}. How many {what} does {who} have now?"
            " End with the number."
        )
        questions.append(SmokeQuestion(prompt, str(boxes * each - gives + gets)))
    return questions


def countings(count: int, length: int = 24, start: int = 100) -> list[SmokeQuestion]:
    """Prompts with long, known, different answers: what one request takes from another shows."""
    questions = []
    for number in range(count):
        first = start + 37 * number
        prompt = (
            f"Write the numbers from {first} to {first + length - 1} in digits, in order,"
            " separated by a comma and a space. Write nothing else."
        )
        numbers = ", ".join(str(n) for n in range(first, first + length))
        questions.append(SmokeQuestion(prompt, numbers))
    return questions


_NEEDLE = "The secret number of {} is {}."
_NEEDLE_QUESTION = "What is the secret number of {}? Answer with the number only."


_ASK = {"role": "user", "content": _NEEDLE_QUESTION.format("Lisbon")}
# Numbers that only an earlier message has: where it is, the messages, and the number. Models keep
# secrets of a system prompt, unless it says otherwise.
_KNOWN = f"{_NEEDLE.format('Lisbon', 7359)} Tell it to everybody who asks."
CONVERSATIONS = (
    (
        "an earlier turn",
        [
            {"role": "user", "content": f"{_NEEDLE.format('Lisbon', 4821)} Remember it."},
            {"role": "assistant", "content": "I will remember it."},
            _ASK,
        ],
        "4821",
    ),
    ("the system prompt", [{"role": "system", "content": _KNOWN}, _ASK], "7359"),
)


# Functions that take a line or two: what each returns, and calls with their results.
CODE_TASKS = {
    "sum_squares": (
        "the sum of the squares of the integers from 1 to n",
        {n: sum(i * i for i in range(n + 1)) for n in (1, 2, 10, 37)},
    ),
    "digit_sum": (
        "the sum of the decimal digits of n",
        {n: sum(map(int, str(n))) for n in (0, 7, 405, 98765)},
    ),
}


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON_SCHEMA = _object(
    name=_STRING,
    age=_INTEGER,
    city={"type": "string", "enum": ["Bergen", "Oslo", "Tromsø"]},
    languages={"type": "array", "items": _STRING},
)


class Person(NamedTuple):
    """A person: a sentence about them, and the facts in it."""

    text: str
    facts: dict[str, Any]

    @property
    def prompt(self) -> str:
        """Asks for the facts."""
        return f"{self.text}\nGive the name, age, city and languages of this person as JSON."


def people(count: int) -> list[Person]:
    """Different people; the first speaks and lives where letters are not all ASCII."""
    cities = PERSON_SCHEMA["properties"]["city"]["enum"]
    found = []
    for number in range(count):
        name, city = _WORDS.names[number % 6], cities[2 - number % 3]
        age, spoken = 34 + 5 * number % 41, [_WORDS.spoken[(number + k) % 7] for k in range(3)]
        listed = f"{spoken[0]}, {spoken[1]} and {spoken[2]}"
        text = f"{name} is {age} years old, lives in {city} and speaks {listed}."
        facts = {"name": name, "age": age, "city": city, "languages": spoken}
        found.append(Person(text, facts))
    return found


# As chats, /v1/responses and /v1/messages have them, each in its own envelope.
FUNCTIONS: list[dict[str, Any]] = [
    {"name": t.name, "description": t.description, "parameters": _object(**t.properties)}
    for t in _WORDS.tools
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
SCENARIOS = _WORDS.scenarios
CITIES = ("Oslo", "Rome", "Tokyo")
PARALLEL = (
    f"What is the weather right now in {CITIES[0]}, in {CITIES[1]} and in {CITIES[2]}?"
    " Call the tool once for each city, all of them now."
)


class Haystack(NamedTuple):
    """A long text with numbers hidden in it."""

    text: str
    needles: tuple[SmokeQuestion, ...]


def haystack(sentences: int, depths: list[float], seed: int) -> Haystack:
    """Filler with a needle at each depth; another seed is another text from its first word on."""
    dice = random.Random(seed)  # noqa: S311
    # numbers of one width, so that every line has about as many tokens as those that were counted
    head = f"Report {seed:06d}, part"
    lines = [f"{head} {i:06d}: {dice.choice(_WORDS.filler)}" for i in range(max(1, sentences))]
    needles = []
    # from the back, so that earlier places stay where they are
    for number, depth in sorted(enumerate(depths), key=lambda pair: -pair[1]):
        town = _WORDS.towns[(number + seed) % len(_WORDS.towns)]
        secret = dice.randint(1000, 9999)
        lines.insert(round(depth * len(lines)), _NEEDLE.format(town, secret))
        needles.append(SmokeQuestion(_NEEDLE_QUESTION.format(town), str(secret)))
    return Haystack("\n".join(lines), tuple(reversed(needles)))


def records(count: int, seed: int, head: str = "") -> Haystack:
    """Records whose names and codes are each other's with the digits in another order.

    Whoever reads them only nearly right takes a neighbour's. `head` makes the text another one from
    its first word on, so that nothing of it can have been kept.
    """
    dice = random.Random(seed)  # noqa: S311
    names = [f"{number:05d}" for number in range(count)]
    dice.shuffle(names)
    digits = list("123456789")
    codes: list[str] = []
    while len(codes) < count:
        four = dice.sample(digits, 4)
        codes += ["".join(order) for order in permutations(four)]
    lines = [
        f"Record R-{name}: code {code}." for name, code in zip(names, codes[:count], strict=True)
    ]
    asked = [round(depth * (count - 1)) for depth in (0.1, 0.4, 0.6, 0.9)]
    questions = tuple(
        SmokeQuestion(
            f"What is the code of record R-{names[place]}? Answer with the number only.",
            codes[place],
        )
        for place in asked
    )
    return Haystack("\n".join([head, *lines] if head else lines), questions)


def known_number() -> tuple[SmokeQuestion, str]:
    """A question, and the sentence that says its answer, for an instruction to hold."""
    _, (statement, asked), want = CONVERSATIONS[-1]
    return SmokeQuestion(asked["content"], want), statement["content"]


def agent_turns(sentences: int) -> list[tuple[str, SmokeQuestion]]:
    """Six turns of a conversation: a text with a number in it, and a question about a number.

    Most ask about an earlier turn; the fourth tells its own, in few words.
    """
    secrets = [str(1237 + 1171 * number) for number in range(6)]
    turns = []
    for number, about in enumerate((0, 0, 1, 3, 2, 0)):
        filler = haystack(1 if number == 3 else sentences, [], seed=70 + number).text
        text = f"{filler}\n{_NEEDLE.format(_WORDS.towns[number], secrets[number])}"
        question = SmokeQuestion(_NEEDLE_QUESTION.format(_WORDS.towns[about]), secrets[about])
        turns.append((f"{text} Tell it to everybody who asks.", question))
    return turns
