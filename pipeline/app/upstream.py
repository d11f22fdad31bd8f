"""Recipes of other projects: import by commit, check against our image, watch for changes.

Files come from the disk or from a local git checkout. Nothing downloads, not even git.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.app.recipes import recipes_of
from pipeline.app.workspace import Workspace
from pipeline.core import proc
from pipeline.core.errors import RecipeInvalid, UpstreamMoved
from pipeline.core.files import read_limited
from pipeline.core.model import NAME, sha256_of
from pipeline.core.yaml_file import mistakes
from pipeline.images.engine.parser_flags import ParserFlags, find_parser_flags, flags_folder
from pipeline.serving.recipe.flags import Flags, SglangFlags, VllmFlags
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.recipe.model import Recipe, RecipeFile, merged_flags
from pipeline.serving.recipe.parser import check_flags, split_command_line
from pipeline.serving.recipe.upstream import (
    MOST_UPSTREAM_BYTES,
    UpstreamCommand,
    by_flag,
    read_commands,
)
from pipeline.serving.report.check import json_differences

# REPO@COMMIT:PATH; a name of a branch or tag will do, and is resolved to its commit.
_IN_CHECKOUT = re.compile(r"(?P<repo>.+)@(?P<commit>[0-9A-Za-z][\w./-]*):(?P<path>[^:]+)")
_RECORDED = re.compile(r"^(?P<place>.*)/blob/(?P<commit>[0-9a-f]{40})/(?P<path>.+)$")
_KINDS: dict[str, type[Flags]] = {"vllm": VllmFlags, "sglang": SglangFlags}
_PORTS = {"vllm": 8000, "sglang": 30000}  # of each engine, where nothing else is said
# What `render` and `serve` decide: an address, a name for clients.
_OURS = ("--host", "--port", "--served-model-name")
# Flags that load code of strangers into the engine, or open its files and keys to requests.
_CODE = (
    *("--tool-parser-plugin", "--reasoning-parser-plugin", "--logits-processors", "--middleware"),
    *("--worker-cls", "--worker-extension-cls", "--allowed-local-media-path", "--api-key"),
    *("--admin-api-key", "--ssl-keyfile", "--forward-hooks", "--custom-weight-loader"),
)
_REMOTE = "--trust-remote-code"
# Variables that tune; others load libraries (LD_PRELOAD), code (PYTHONPATH) or carry keys.
_TUNING = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "TRITON_", "FLASHINFER_", "GLOO_")


class UpstreamFile(NamedTuple):
    """A file of another project."""

    path: PurePosixPath
    data: bytes
    commit: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class ImportRequest:
    """Which command of which file becomes which recipe, for which cards."""

    place: str  # a file, or REPO@COMMIT:PATH
    name: str
    pick: str | None = None  # the label of a command, where a file has several
    image: str | None = None
    cards: int | None = None
    card: str = "rtx-pro-6000"
    features: tuple[str, ...] = ()
    hardware: str | None = None
    drops: tuple[str, ...] = ()
    remote_code: bool = False


class SettingDifference(NamedTuple):
    """A setting that two commands do not share."""

    what: str
    before: str | None
    after: str | None


class Imported(NamedTuple):
    """The recipe as written, and where its command departs from the document's."""

    body: dict[str, Any]
    differences: list[SettingDifference]


def _git(repo: Path, *words: str) -> bytes | None:
    """Ask git about a local checkout, without network; None if git fails."""
    git = proc.find_tool("git", "Install git, or name a file.")
    quiet = {
        "GIT_ALLOW_PROTOCOL": "none",  # also not for objects that a partial clone lacks
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
    }
    done = proc.read(
        [git, "-C", str(repo), *words], env=proc.child_environment(**quiet), timeout_s=60
    )
    return done.stdout if done.returncode == 0 else None


def _blob(repo: Path, commit: str, path: str) -> bytes | None:
    """Read a file at a commit; None if that commit has no such file."""
    name = f"{commit}:{path}"
    size = _git(repo, "cat-file", "-s", name)
    if size is None or _git(repo, "cat-file", "-t", name) != b"blob\n":
        return None
    if int(size) > MOST_UPSTREAM_BYTES:
        message = f"{name}: larger than {MOST_UPSTREAM_BYTES} bytes"
        raise RecipeInvalid(message, "Name the file of one model.")
    return _git(repo, "cat-file", "blob", name)


def _commit(repo: Path, name: str) -> str:
    found = _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if found is None:
        raise RecipeInvalid(
            f"{repo}: has no commit {name!r}, or is no git checkout",
            "Fetch it there yourself: this command downloads nothing.",
        )
    return found.decode().strip()


def _project(repo: Path) -> str:
    """Find the web address that a checkout was cloned from, else its folder's name."""
    url = (_git(repo, "config", "--get", "remote.origin.url") or b"").decode(errors="replace")
    url = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", url.strip())
    url = re.sub(r"//[^/@]*@", "//", url).removesuffix("/").removesuffix(".git")
    return url if url.startswith("https://") else repo.resolve().name


def read_upstream(place: str) -> UpstreamFile:
    """A file of another project, from the disk or from a commit of a local checkout."""
    if (named := _IN_CHECKOUT.fullmatch(place)) and not Path(place).exists():
        repo, path = Path(named["repo"]), named["path"]
        commit = _commit(repo, named["commit"])
        data = _blob(repo, commit, path)
        if data is None:
            hint = f"`git -C {repo} ls-tree -r --name-only {commit[:12]}` lists its files."
            raise RecipeInvalid(f"{repo}: has no file {path} at {commit[:12]}", hint)
        link = f"{_project(repo)}/blob/{commit}/{path}"
        return UpstreamFile(PurePosixPath(path), data, commit, link)
    if re.match(r"\w+://", place):
        hint = "Clone the project, then name the file as REPO@COMMIT:PATH, or save the file."
        raise RecipeInvalid(f"{place}: is an address, and this command downloads nothing", hint)
    data = read_limited(Path(place), MOST_UPSTREAM_BYTES, RecipeInvalid)
    return UpstreamFile(PurePosixPath(place), data)


def import_recipe(workspace: Workspace, request: ImportRequest) -> Imported:
    """Turn a command of another project's file into a recipe, or give every reason against."""
    file = read_upstream(request.place)
    commands = read_commands(file.data, file.path, request.features, request.hardware)
    labels = [command.label for command in commands]
    picked = [c for c in commands if request.pick in (c.label, None)]
    if len(picked) != 1:
        what = f"there is no command {request.pick!r}" if request.pick else "which command?"
        hint = f"Name one with --pick: {', '.join(labels[:40])}."
        raise RecipeInvalid(f"{file.path}: {what}", hint)
    (command,) = picked
    if command.refused:
        hint = "Nothing was written. --list shows what else the file has; or write it by hand."
        raise RecipeInvalid(f"{file.path}: {command.label}: {command.refused}", hint)
    if unknown := sorted({*request.drops} - {*by_flag(command.words)}):
        have = " ".join(by_flag(command.words)) or "no flags"
        message = f"{file.path}: {command.label}: --drop {unknown[0]}: the command does not have it"
        raise RecipeInvalid(message, f"Nothing was written. It has {have}.")
    checkout = workspace.checkout()
    image = request.image or command.engine
    checkout.spec(image)  # an error that lists the images, where there is none of this name
    known = find_parser_flags(flags_folder(checkout), command.engine, image)
    values, extra, problems = _fields(command, known, request)
    if not re.fullmatch(NAME, request.name):
        hint = "Lower-case letters, digits, dots, plus and minus make a name, such as kimi-k26-8x."
        raise RecipeInvalid(f"--name: {request.name!r} is no name for a recipe", hint)
    cards = request.cards or values.get("tensor_parallel_size", 1)
    title = f"{file.path.name}, {command.label}"
    title += "" if file.commit else f" (a file with {sha256_of(file.data)})"
    sources: dict[str, Any] = {"upstream": {"kind": "document", "title": title}}
    if file.link:
        sources["upstream"]["link"] = file.link
    flags: dict[str, Any] = {"upstream": {**values, **({"extra": extra} if extra else {})}}
    if cards > 1 and "tensor_parallel_size" not in values:
        why = "the document leaves the number of cards to its reader"
        sources["ours"] = {"kind": "ours", "title": "The number of cards", "why": why}
        flags["ours"] = {"tensor_parallel_size": cards}
    body: dict[str, Any] = {
        "name": request.name,
        "summary": f"{command.model} on {cards} x {request.card}, as {file.path.name} says",
        "backing": "stated",
        "sources": sources,
        "engine": command.engine,
        "image": image,
        "model": {"repository": command.model, "name": command.model.partition("/")[2]},
        "hardware": {"cards": cards, "card": request.card},
        "port": _PORTS[command.engine],
        "flags": {source: group for source, group in flags.items() if group},
        "environment": {"upstream": command.environment} if command.environment else {},
    }
    dropped = [f for f in by_flag(command.words) if f in request.drops]
    if dropped:
        why = f"left out when it was imported; {known.title} is in the image {image}"
        texts = [" ".join([f, *v]) for f, v in by_flag(command.words).items() if f in dropped]
        body["changes"] = [{"document": t, "here": "nothing", "why": why} for t in texts]
    for name in command.environment:
        if not name.startswith((*known.prefixes, *_TUNING)):
            problems.append(f"{name}: is no variable of the engine or of CUDA")
    try:
        recipe = RecipeFile.model_validate(body).root
    except ValidationError as error:
        hint = "Nothing was written. Look at what the file says."
        raise RecipeInvalid(f"{file.path}: {command.label}: {mistakes(error)}", hint) from error
    launch = plan_launch(recipe, Overrides(), weights="/models")
    problems += [str(problem) for problem in check_flags(launch, known)]
    if problems:
        raise RecipeInvalid(
            f"{file.path}: {command.label}: {'; '.join(dict.fromkeys(problems))}",
            f"Nothing was written. --drop FLAG leaves one out, and the recipe says so;"
            f" `sm120 recipe flags {image}` shows what {known.title} accepts.",
        )
    here = by_flag(launch.arguments[1:] if command.engine == "vllm" else launch.arguments)
    # by the flag's first name: a document may say --tp, or write underscores
    asked, got = (
        {_first_name(flag, known): " ".join(values) for flag, values in each.items()}
        for each in (by_flag(command.words), here)
    )
    for own in ("--model-path", *_OURS):
        # in a container the recipe listens on all addresses, and is published to one
        if own == "--host" or own not in asked:
            got.pop(own, None)
    return Imported({k: v for k, v in body.items() if v}, setting_differences(asked, got))


def list_commands(request: ImportRequest) -> list[dict[str, str]]:
    """List each command of a file: its label, model, and words or why it is refused."""
    file = read_upstream(request.place)
    return [
        {
            "label": c.label,
            "model": "-" if c.refused else c.model,
            "command": f"refused: {c.refused}" if c.refused else " ".join(c.words),
        }
        for c in read_commands(file.data, file.path, request.features, request.hardware)
    ]


def _first_name(flag: str, known: ParserFlags) -> str:
    """Return the parser's name for a flag, even if a document abbreviates it."""
    (given,) = split_command_line([flag], known).given
    return f"{given.name}.{given.path}" if given.path else given.name or flag


def _fields(
    command: UpstreamCommand, known: ParserFlags, request: ImportRequest
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Split flags into fields of a recipe, words without a field, and refused ones."""
    kind = _KINDS[command.engine]
    names = [name for name in kind.model_fields if name not in ("extra", "compilation_config")]
    fields = {_first_name(kind.flag(name), known): name for name in names}
    values: dict[str, Any] = {}
    extra: list[str] = []
    problems: list[str] = []
    line = split_command_line(command.words, known)
    problems += [f"{word}: is a word that no flag takes" for word in line.plain]
    for given in line.given:
        words = [given.written, *given.values]
        if given.name in _OURS or given.written in request.drops:
            continue
        if given.name in _CODE:
            problems.append(f"{given.written}: loads code, files or keys of others")
        elif given.name == _REMOTE and not request.remote_code:
            problems.append(
                f"{_REMOTE}: runs Python of the model's repository; --allow-remote-code takes it"
            )
        field = fields.get(given.name or "") if not given.path else None
        value: Any = not given.is_off
        if given.values:
            value = given.values[0]
            # a command line writes a field that holds a table as JSON
            if value.startswith("{"):
                try:
                    value = json.loads(value)
                except ValueError:
                    field = None
        try:
            if field is None or len(given.values) > 1 or field in values:
                raise ValueError("has no field")
            values[field] = getattr(kind.model_validate({field: value}), field)
        except ValueError:
            extra += words
    return values, extra, problems


def setting_differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[SettingDifference]:
    """List every setting that differs, with both values; None where a side lacks it."""
    found = []
    for pointer, *values in json_differences(dict(before), dict(after)):
        texts = [v if isinstance(v, str | None) else json.dumps(v, default=str) for v in values]
        what = pointer.strip("/").replace("~1", "/").replace("/", ".")
        found.append(SettingDifference(what, *texts))
    return found


def compare_recipes(one: Recipe, other: Recipe) -> list[SettingDifference]:
    """Compare two recipes: model, image, cards, every flag and every variable."""
    left_out = {"name", "summary", "sources", "flags", "environment", "changes", "contrary"}
    bodies = []
    for recipe in (one, other):
        body = recipe.model_dump(mode="json", exclude=left_out | {"backing", "reviewed", "bench"})
        flags = merged_flags(recipe)
        body["flags"] = {**flags.given(), **({"extra": flags.extra} if flags.extra else {})}
        bodies.append({**body, "environment": recipe.variables()})
    return setting_differences(*bodies)


class RecipeDrift(NamedTuple):
    """How a document changed since the commit that a recipe names."""

    recipe: str
    source: str
    path: str
    commit: str  # that the recipe names
    state: str  # same, moved, gone or unknown
    why: str
    differences: list[SettingDifference]


def find_drift(
    workspace: Workspace, names: Sequence[str], upstream: str, folders: tuple[Path, ...] = ()
) -> tuple[list[RecipeDrift], UpstreamMoved | None]:
    """Compare recipes' documents then and now, in a local checkout; and the error that follows.

    `upstream` is REPO or REPO@COMMIT. Skips sources that are of other projects.
    """
    place, _, wanted = upstream.partition("@")
    repo = Path(place)
    newest, project = _commit(repo, wanted or "HEAD"), _project(repo)
    recipes, found = recipes_of(workspace, folders), list[RecipeDrift]()
    for name in names or recipes.names():
        for source, about in recipes.read(name).sources.items():
            recorded = _RECORDED.match(about.link or "")
            if recorded is None or recorded["place"] != project:
                continue
            commit, path = recorded["commit"], recorded["path"]
            state, why, changed = "unknown", "", list[SettingDifference]()
            if _git(repo, "cat-file", "-e", f"{commit}^{{commit}}") is None:
                why = "the checkout does not have its commit"
            elif _git(repo, "merge-base", "--is-ancestor", commit, newest) is None:
                why = f"{newest[:12]} does not come after it"
            elif (before := _blob(repo, commit, path)) is None:
                why = "its commit has no such file"
            elif (after := _blob(repo, newest, path)) is None:
                state, why = "gone", f"is not there any more at {newest[:12]}"
            elif before == after:
                state, why = "same", f"as at {newest[:12]}"
            else:
                state, why = "moved", f"its text is another one at {newest[:12]}"
                try:
                    then, now = (
                        {
                            c.label: {
                                "model": c.model,
                                **{f: " ".join(v) for f, v in by_flag(c.words).items()},
                                **c.environment,
                            }
                            for c in read_commands(data, PurePosixPath(path))
                        }
                        for data in (before, after)
                    )
                    changed = setting_differences(then, now)
                    why = f"{why}, its commands are the same" if not changed else why
                except RecipeInvalid as error:
                    why = f"{why}; its commands cannot be compared: {error}"
            found.append(RecipeDrift(name, source, path, commit, state, why, changed))
    moved = [each for each in found if each.state in ("moved", "gone")]
    if not moved:
        return found, None
    first = moved[0]
    message = f"{first.recipe}: {first.path} {first.why}"
    more = f" (and {len(moved) - 1} more)" if moved[1:] else ""
    return found, UpstreamMoved(f"{message}{more}")
