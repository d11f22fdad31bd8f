"""Commands in other projects' recipes: vLLM's recipes, SGLang's cookbook, and pages of Markdown.

The formats are those of vllm-project/recipes (`models/ORG/REPO.yaml`, CONTRIBUTING.md at 015a26cb),
sgl-project/sgl-cookbook (`data/models/generated/*/*.yaml` at 3627bcb4) and sgl-project/sglang
(`docs_new/src/snippets/configs/*/*.jsx` at 1d8c2d38, `docs_new/cookbook/*/*/*.mdx`). They are data
of strangers: this module runs nothing in them, and refuses, never skips, what it cannot read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias

from pydantic import RootModel, ValidationError

from pipeline.core.errors import RecipeInvalid, SpecInvalid
from pipeline.core.model import ForeignModel, Frozen, HubRepository
from pipeline.core.yaml_file import mistakes, parse_yaml

UpstreamEngine: TypeAlias = Literal["vllm", "sglang"]
MOST_UPSTREAM_BYTES = 1 << 20
_MOST_LINE, _MOST_COMMANDS = 20_000, 400
_HINT = "Nothing was imported. Look at the file, and write the recipe by hand where it is right."
# The words that start each engine; what follows them are its arguments.
_PROGRAMS: Mapping[tuple[str, ...], UpstreamEngine] = {
    ("vllm", "serve"): "vllm",
    ("-m", "vllm.entrypoints.openai.api_server"): "vllm",
    ("sglang", "serve"): "sglang",
    ("-m", "sglang.launch_server"): "sglang",
}
_MENTION = re.compile(
    r"\bvllm serve\b|\bsglang serve\b|vllm\.entrypoints\.openai|sglang\.launch_s"
    r"|\b(?:docker|podman) run\b[^#]*\b(?:vllm/vllm-openai|lmsysorg/sglang)\b"
)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(\S*).*\n((?:.*\n)*?)[ \t]*\1[ \t]*$", re.MULTILINE)
_SHELL = ("bash", "sh", "shell", "console", "zsh", "")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")
_NAMED_MODEL = ("--model-path", "--model")
# One cell of a cookbook's page: what it is for, its variables and its flags, all of them literals.
_CELL = re.compile(
    r"match:\s*\{(?P<match>[^{}]*)\},(?:\s*//[^\n]*|\s*\w+:\s*(?:true|false|\"[^\"\n]*\"),)*"
    r"\s*env:\s*\[(?P<env>[^\[\]]*)\],\s*flags:\s*\[(?P<flags>[^\[\]]*)\]"
)
_PAIR = re.compile(r"(\w+):\s*\"([^\"\n]*)\"")
_LITERAL = re.compile(r"\"((?:[^\"\\\n]|\\.)*)\"|'((?:[^'\\\n]|\\.)*)'|(`)")
_MODEL_NAMES = re.compile(r"modelNames:\s*\{([^{}]*)\}")


class UpstreamCommand(Frozen):
    """One start of an engine, as a file of another project has it."""

    label: str  # how a user names it
    engine: UpstreamEngine
    model: HubRepository
    words: list[str]  # the arguments of the engine, without the model
    environment: dict[str, str] = {}
    refused: str = ""  # why it cannot be used, if its words cannot be read


class _VllmPart(ForeignModel):
    """A feature, a mode of it, a variant or an override of vLLM's recipes."""

    args: list[str] = []
    env: dict[str, str] = {}
    extra_args: list[str] = []
    extra_env: dict[str, str] = {}
    model_id: HubRepository | None = None
    hardware_overrides: dict[str, _VllmPart] = {}
    modes: dict[str, _VllmPart] = {}
    default_mode: str | None = None


class _VllmModel(ForeignModel):
    model_id: HubRepository
    base_args: list[str] = []
    base_env: dict[str, str] = {}


class _VllmFile(ForeignModel):
    model: _VllmModel
    features: dict[str, _VllmPart] = {}
    opt_in_features: list[str] = []
    variants: dict[str, _VllmPart]
    hardware_overrides: dict[str, _VllmPart] = {}
    guide: str = ""

    def commands(self, features: Sequence[str], hardware: str | None) -> Iterator[UpstreamCommand]:
        """Each variant with the features that are on, and the commands of the guide."""
        enabled = [name for name in self.features if name not in self.opt_in_features]
        enabled += [name for name in features if name not in enabled]
        for name, variant in self.variants.items():
            parts = [variant]
            for overrides in (self.hardware_overrides, variant.hardware_overrides):
                # the card by its own name, else its generation, else its maker
                keys = [key for key in (hardware, "blackwell", "nvidia") if key in overrides]
                parts += [overrides[str(key)] for key in keys[:1]]
            # features come last, and the last of two flags counts: CONTRIBUTING.md
            for feature in (self.features[each] for each in enabled):
                modes = feature.modes
                first = next(iter(modes.values()), feature)
                parts.append(modes.get(feature.default_mode or "", first))
            words, environment = [*self.model.base_args], {**self.model.base_env}
            for part in parts:
                words += [*part.extra_args, *part.args]
                environment |= {**part.extra_env, **part.env}
            yield UpstreamCommand(
                label=f"variant/{name}",
                engine="vllm",
                model=variant.model_id or self.model.model_id,
                words=[word for flag, values in by_flag(words).items() for word in (flag, *values)],
                environment=environment,
            )
        yield from _of_markdown(self.guide)


class _Engine(ForeignModel):
    env_vars: dict[str, str] = {}
    tp: int | None = None
    dp: int | None = None
    ep: int | None = None
    enable_dp_attention: bool | None = None
    extra_args: list[str] = []


class _Configuration(ForeignModel):
    name: str
    quantized_model_path: HubRepository | None = None
    engine: _Engine | None = None
    prefill: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None


class _Hardware(ForeignModel):
    configurations: list[_Configuration]


class _CookbookModel(ForeignModel):
    name: str
    model_path: HubRepository
    hardware: dict[str, _Hardware]


class _Family(ForeignModel):
    models: list[_CookbookModel]


class _CookbookFile(ForeignModel):
    families: list[_Family]

    def commands(self) -> Iterator[UpstreamCommand]:
        """Each model on each hardware, with each of its configurations."""
        for model in (model for family in self.families for model in family.models):
            cells = [(c, each) for c, h in model.hardware.items() for each in h.configurations]
            for card, each in cells:
                engine, refused = each.engine or _Engine(), ""
                if each.prefill or each.decode or each.engine is None:
                    refused = "prefill and decode run on different servers, which a recipe cannot"
                numbers = {"--tp": engine.tp, "--dp": engine.dp, "--ep": engine.ep}
                words = [w for flag, n in numbers.items() if n for w in (flag, str(n))]
                words += ["--enable-dp-attention"] if engine.enable_dp_attention else []
                yield UpstreamCommand(
                    label=f"{model.name}/{card}/{each.name}",
                    engine="sglang",
                    model=each.quantized_model_path or model.model_path,
                    words=[*words, *engine.extra_args],
                    environment=engine.env_vars,
                    refused=refused,
                )


class _AnyFile(RootModel[dict[str, Any]]):
    """A file of YAML whose kind is not known yet."""


def read_commands(
    data: bytes, path: PurePath, features: Sequence[str] = (), hardware: str | None = None
) -> list[UpstreamCommand]:
    """Every start of an engine that a file of another project names.

    `features` are those of a vLLM recipe that are off by default; `hardware` is its name of a card.
    """
    if len(data) > MOST_UPSTREAM_BYTES:
        raise RecipeInvalid(f"{path}: larger than {MOST_UPSTREAM_BYTES} bytes", _HINT)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RecipeInvalid(f"{path}: is not UTF-8 (byte {error.start})", _HINT) from error
    if "\0" in text:
        raise RecipeInvalid(f"{path}: is a binary file", _HINT)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _MOST_LINE:
            message = f"{path}: line {number} has {len(line)} characters, more than {_MOST_LINE}"
            raise RecipeInvalid(message, _HINT)
    kind = path.suffix.lower()
    if (features or hardware) and kind not in (".yaml", ".yml"):
        raise RecipeInvalid(f"{path}: --feature and --hardware are for vLLM's recipes", _HINT)
    try:
        if kind in (".yaml", ".yml"):
            body = parse_yaml(data, _AnyFile, Path(path)).root
            if "families" in body:
                found = _CookbookFile.model_validate(body).commands()
            elif {"model", "variants"} <= {*body}:
                file = _VllmFile.model_validate(body)
                if unknown := sorted({*features} - {*file.features}):
                    known = ", ".join(file.features) or "none"
                    message = f"{path}: has no feature {unknown[0]!r} (it has {known})"
                    raise RecipeInvalid(message, _HINT)
                found = file.commands(features, hardware)
            else:
                message = "has neither `model` and `variants` (vLLM's recipes) nor `families`"
                raise RecipeInvalid(f"{path}: {message} (SGLang's cookbook)", _HINT)
        elif kind == ".jsx":
            found = _of_page(text, path)
        elif kind in (".md", ".mdx"):
            found = _of_markdown(text)
        else:
            message = f"ends with {kind or 'nothing'}; .yaml, .md, .mdx and .jsx can be read"
            raise RecipeInvalid(f"{path}: {message}", _HINT)
        commands = list(islice(found, _MOST_COMMANDS + 1))
    except SpecInvalid as error:
        raise RecipeInvalid(str(error), _HINT) from error
    except ValidationError as error:
        raise RecipeInvalid(f"{path}: {mistakes(error)}", _HINT) from error
    if len(commands) > _MOST_COMMANDS:
        raise RecipeInvalid(f"{path}: has more than {_MOST_COMMANDS} commands", _HINT)
    if not commands:
        raise RecipeInvalid(f"{path}: names no start of vLLM or SGLang", _HINT)
    return commands


def _of_page(text: str, path: PurePath) -> Iterator[UpstreamCommand]:
    """The cells of a page of SGLang's cookbook: reads only the literals of its JavaScript."""
    named = _MODEL_NAMES.search(text)
    quoted = re.findall(r"\"([^\"\n]*)\":\s*\"([^\"\n]*)\"", named[1]) if named else []
    models = dict(quoted)
    cells = list(_CELL.finditer(text))
    if len(cells) != len(re.findall(r"\bmatch:\s*\{", text)):
        message = "a cell is more than `match`, `env` and `flags` of literals"
        raise RecipeInvalid(f"{path}: {message}; code is not run", _HINT)
    for cell in cells:
        match = dict(_PAIR.findall(cell["match"]))
        lists = []
        for name in ("env", "flags"):
            found = _LITERAL.findall(cell[name])
            rest = re.sub(r"//[^\n]*", "", _LITERAL.sub("", cell[name]))
            if rest.strip(" \t\r\n,") or any(tick for _, _, tick in found):
                message = f"`{name}` of a cell is not a list of texts: {rest.strip()[:60]}"
                raise RecipeInvalid(f"{path}: {message}", _HINT)
            lists.append([double or single for double, single, _ in found])
        variables, flags = lists
        model = models.get(f"{match.get('variant')}|{match.get('quant')}", "")
        label = "/".join(match.values())
        try:
            words = [word for flag in flags for word in words_of(flag)]
            settings = dict(each.split("=", 1) for each in variables)
            # the address is this tool's own choice
            for place in ("--host", "--port"):
                if place in words:
                    del words[words.index(place) : words.index(place) + 2]
            words = [model if word == "{{MODEL_NAME}}" else word for word in words]
            yield _command(label, "sglang", words, settings)
        except ValueError as error:
            raise RecipeInvalid(f"{path}: cell {label}: {error}", _HINT) from error


def _of_markdown(text: str) -> Iterator[UpstreamCommand]:
    """The shell blocks that start an engine, each under its number in the file."""
    number = 0
    for fence in _FENCE.finditer(text):
        if fence[2].lower() not in _SHELL or not _MENTION.search(fence[3]):
            continue
        number += 1
        label = f"command/{number}"
        try:
            words, settings = words_of(fence[3]), dict[str, str]()
            while words and _VARIABLE.match(words[0]):
                name, _, value = words.pop(0).partition("=")
                settings[name] = value
            starts = [
                (at + len(start), engine)
                for start, engine in _PROGRAMS.items()
                for at in (0, 1)
                if tuple(words[at : at + len(start)]) == start
            ]
            if not starts:
                raise ValueError(f"it starts {words[0] if words else 'nothing'}, not an engine")
            begin, engine = starts[0]
            yield _command(label, engine, words[begin:], settings)
        except ValueError as error:
            # one block that cannot be read does not hide the others
            yield UpstreamCommand(
                label=label, engine="vllm", model="not/read", words=[], refused=str(error)
            )


def _command(
    label: str, engine: UpstreamEngine, words: list[str], settings: dict[str, str]
) -> UpstreamCommand:
    """The words after an engine's program, with the model apart."""
    model = ""
    if words and not words[0].startswith("-"):
        model, words = words[0], words[1:]
    for flag in (flag for flag in _NAMED_MODEL if flag in words[:-1]):
        model = words[words.index(flag) + 1]
        del words[words.index(flag) : words.index(flag) + 2]
    try:
        return UpstreamCommand(
            label=label, engine=engine, model=model, words=words, environment=settings
        )
    except ValidationError as error:
        raise ValueError(f"the model {model!r} is no repository of the Hub") from error


def words_of(text: str) -> list[str]:
    """Splits one plain command into words; refuses anything else that a shell would do."""
    quote = ""
    joined = text.replace("\\\r\n", " ").replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and line.strip()[0] != "#"]
    # a quoted text may go over lines, a second command may not
    command = "\n".join(lines).strip().removeprefix("$ ")
    for at, sign in enumerate(command):
        if sign != "\n" and not sign.isprintable():
            raise ValueError(f"it has an invisible character, {sign!a}")
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "\n":
            raise ValueError("it is more than one command")
        elif sign == "#" and command[at - 1].isspace():
            raise ValueError("it has a comment inside, which ends a command")
        elif sign in "|;&<>()":
            raise ValueError(f"{command[at : at + 12]!r} is work for a shell, which is not run")
        if sign in "$`" and quote != "'":
            raise ValueError(f"{command[at : at + 12]!r} is filled in by a shell, which is not run")
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"it cannot be split into words: {error}") from error


def by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with its values; of two with the same name the last one counts."""
    groups: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
            name, equals, value = word.partition("=")
            # it stands where the last one stood
            groups.pop(name, None)
            groups[name] = [value] if equals else []
        else:
            groups.setdefault(next(reversed(groups), ""), []).append(word)
    return groups
