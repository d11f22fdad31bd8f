"""Every verb of `sm120`: its group, its sentence in the help, and the module that is loaded for it.

The sentences stand here and not beside the verbs, so that `sm120 --help` and shell completion
answer without loading the modules: those import what their verbs need, which takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from pipeline.cli.completion import Kind, complete_names
from pipeline.core import log
from pipeline.core.errors import UnknownName


class Verb(NamedTuple):
    """Where a command is below pipeline.cli, and what it does.

    `module:function`, or the module alone where the function is named after group and verb.
    """

    where: str
    summary: str
    names: Kind | None = None  # what its first argument names, for shell completion
    begins: str = ""  # said before its module is loaded, where that takes seconds


_PLAN = Verb(
    "image:plan_command", "Show what a build would fetch and how much disk it needs.", "image"
)
_BUILD = Verb("image:build_command", "Build images into the store: no Docker, no root.", "image")
_LOAD = Verb("image_files:load_command", "Load a built image into Docker.", "image")
_RENDER = Verb(
    "recipe:render_command", "Print a recipe as the command or unit that runs it.", "recipe"
)
_PUBLISH = Verb(
    "registry:publish_command", "Push a built image and its evidence to a registry.", "image"
)
_VERIFY = Verb("evidence:verify_command", "Check the evidence of an image, a file or weights.")
_SERVE = Verb("serve:serve_command", "Start a recipe's engine and wait until it answers.", "recipe")
_DOCTOR = Verb("host:doctor_command", "Recognise known problems in logs and on this host.")

# in the order of a first day
DAILY = {
    "plan": _PLAN,
    "build": _BUILD,
    "load": _LOAD,
    "render": _RENDER,
    "serve": _SERVE,
    "smoke": Verb(
        "smoke:smoke_command", "Prove what a served model answers, rung by rung.", "recipe"
    ),
    "tune": Verb(
        "tune:tune_command", "Find faster sizes for a recipe's kernel, on a card.", "recipe"
    ),
    "report": Verb(
        "report:report_command", "Show benchmark results as a page, PDF, Markdown or CSV."
    ),
    "verify": _VERIFY,
    "publish": _PUBLISH,
    "run": Verb("run_plan:run_command", "Run a plan: commands in order, each once for its inputs."),
    "bundle": Verb("bundle:bundle_command", "Bring all that a plan needs into a folder."),
    "unbundle": Verb("bundle:unbundle_command", "Check such a folder, and use or serve it."),
    "bump": Verb("bump:bump_command", "Judge newer versions of an image's engine.", "image"),
    "doctor": _DOCTOR,
}

IMAGE = {
    "list": Verb("image", "List the images, and which are locked and built."),
    "new": Verb("image_files", "Write the spec of an image of your own."),
    "add-patch": Verb("image_files", "Add a patch, from a diff or an edited file.", "image"),
    "plan": _PLAN,
    "build": _BUILD,
    "warm": Verb("image_warm", "Compile an image's kernels before its first request.", "image"),
    "test": Verb("image", "Prove that images start, without a GPU.", "image"),
    "load": _LOAD,
    "export": Verb("image_files", "Write a built image as an OCI layout folder.", "image"),
    "collect": Verb("image_files", "Download all inputs for a machine without network.", "image"),
    "lock": Verb("image_files", "Resolve exact versions and hashes; write the locks.", "image"),
    "rebuild": Verb("image", "Build again from nothing and compare every byte.", "image"),
    "answer": Verb("image", "Build images by their keys, as a node of Slurm.", "image"),
    "explain": Verb("image_files", "Show which package or patch a file comes from.", "image"),
    "files": Verb("image_files", "List the files of a built image.", "image"),
    "cat": Verb("image_files", "Print a file of a built image.", "image"),
    "sources": Verb("image_files", "Show where this machine downloads files from."),
    "schema": Verb("image_files", "Print the JSON schema of a file or statement."),
}
SOURCE = {
    "list": Verb("source", "List the sources, their builds and times."),
    "lock": Verb("source", "Look up archives of sources; write their locks."),
    "build": Verb("source", "Compile a source into the store."),
    "export": Verb("source", "Write a compiled source's files into a folder."),
    "publish": Verb("source", "Push a compiled source's layer to a registry."),
}
GATE = {
    "run": Verb("gate", "Judge an image: shared memory, numerics, machine code.", "image"),
    "answer": Verb("gate", "Answer cases by their keys, as a node of Slurm.", "image"),
    "show": Verb("gate", "Show the kept results of an image's gates.", "image"),
    "find": Verb("gate", "Find the case of a kernel, by name or by a traceback."),
    "patches": Verb("gate", "Judge whether each patch of an image is needed.", "image"),
    "tune": Verb("gate", "Rank other launch parameters for one gate case.", "image"),
}
WEIGHTS = {
    "list": Verb("weights", "List the weights that this checkout knows."),
    "fit": Verb("fit", "Calculate whether a model fits your GPUs."),
    "lock": Verb("weights", "Look up the size and hash of every file."),
    "fetch": Verb("weights", "Download locked weights and check every byte."),
    "verify": Verb("weights", "Check files against their lock; repair them."),
    "scrub": Verb("weights", "Read some files again, for a nightly timer."),
    "serve": Verb("weights", "Serve weights to other machines as a Hub."),
    "image": Verb("weights", "Push a set as a plain OCI image."),
    "sign": Verb("weights", "Sign a set in the model-signing format."),
    "check-signature": Verb("weights", "Check a model-signing signature."),
    "attest": Verb("weights", "State what a set is and how it was verified."),
}
RECIPE = {
    "list": Verb("recipe", "List the recipes and what each rests on."),
    "show": Verb("recipe", "Show a recipe with all that it extends.", "recipe"),
    "render": _RENDER,
    "flags": Verb("recipe", "Show the flags that the engine of an image accepts.", "image"),
    "diff": Verb("recipe_upstream", "List what two recipes do not share.", "recipe"),
    "import": Verb("recipe_upstream", "Make a recipe of a command in another project's file."),
    "drift": Verb(
        "recipe_upstream", "Say whether the documents behind recipes have changed.", "recipe"
    ),
    "serve": _SERVE,
    "status": Verb("serve", "Show what is served, and whether it is as built."),
    "logs": Verb("serve", "Print the log of a served recipe.", "recipe"),
    "stop": Verb("serve", "End a served recipe and remove its container.", "recipe"),
    "attempts": Verb("serve", "Show what was tried, and how it went."),
}
QUALITY = {
    "run": Verb("quality", "Compare a server with its model's template and a reference.", "recipe"),
    "import": Verb("quality", "Hold a score of another program against its bar."),
}
BENCH = {
    "run": Verb(
        "bench",
        "Measure a served recipe or any server; the word may be left out.",
        "recipe",
        "Preparing to measure",
    ),
    "answer": Verb("bench", "Serve and measure by keys, as a node of Slurm.", "recipe"),
    "list": Verb("bench", "List the workloads that are shipped."),
    "compare": Verb("bench", "Compare two results; a gate for CI."),
    "record": Verb("bench", "Make a trace of an engine's own log."),
    "attest": Verb("bench", "State and sign the results of benchmarks."),
}
HOST = {
    "lock": Verb("hosts", "Look up the exact packages that hosts get."),
    "provision": Verb("hosts", "Bring the hosts of an inventory to the lock."),
    "verify": Verb("hosts", "Prove that hosts have what their roles promise."),
    "status": Verb("hosts", "Show what every host of an inventory serves."),
    "rollback": Verb("hosts", "Bring back the driver that worked last."),
    "deploy": Verb("deploy", "Run a recipe as a service on the hosts, proved.", "recipe"),
    "facts": Verb("host", "Show what this host is: GPUs, driver, bus, kernel."),
    "check": Verb("host", "Judge this host and test what its GPUs do."),
    "doctor": _DOCTOR,
    "tune-nccl": Verb("host", "Measure NCCL settings and keep the best."),
    "drift": Verb("host", "Compare a host with its recorded facts."),
    "outliers": Verb("host", "Find the host or GPU that differs from the rest."),
    "attest": Verb("hosts", "Sign recorded facts of hosts."),
}
EVIDENCE = {
    "verify": _VERIFY,
    "make": Verb("evidence", "State and sign what a built image is made of.", "image"),
    "attest": Verb("evidence", "Sign a statement about any file."),
    "sbom": Verb("evidence", "Print the bill of materials of a built image.", "image"),
    "audit": Verb("audit", "Find known vulnerabilities in images, offline.", "image"),
    "new-key": Verb("evidence", "Make a key that signs evidence."),
    "list-keys": Verb("evidence", "List the trusted keys and what they may sign."),
    "show-key": Verb("evidence", "Print a key's entry for a trust file."),
    "trust-key": Verb("evidence", "Believe somebody's public key from now on."),
    "untrust-key": Verb("evidence", "Take a key out of a trust file again."),
}
REGISTRY = {
    "publish": _PUBLISH,
    "pull": Verb("registry", "Fetch an image by digest into an OCI layout folder."),
    "tags": Verb("registry", "List the tags of a repository."),
    "clean": Verb("registry", "Delete what no kept tag needs."),
}
STORE = {
    "show": Verb("store", "Show how much the store holds."),
    "check": Verb("store", "Read every file again and compare it with its hash."),
    "trim": Verb("store", "Remove what no built image needs."),
}

CATALOGUE = {"make": Verb("bump", "Judge releases of engines for each card.")}


# How alike a word and a verb of its own group are, so that verbs of other groups do not count.
_NEAR = 0.7


class VerbGroup(click.Group):
    """A group whose verbs are loaded when they are asked for."""

    def __init__(
        self,
        name: str | None = None,
        *,
        verbs: Mapping[str, Verb],
        parts: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.verbs = dict(verbs)
        self.parts = parts or {"Commands": list(verbs)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.verbs]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, whose module is loaded now."""
        if cmd_name not in self.commands and cmd_name in self.verbs:
            # now and not at the top: `sm120 plan` need not load HTTP clients and key material
            module, _, function = self.verbs[cmd_name].where.partition(":")
            function = function or f"{self.name}_{cmd_name}_command".replace("-", "_")
            loaded: click.Command = getattr(import_module(f"pipeline.cli.{module}"), function)
            loaded.name = cmd_name
            self.add_command(loaded)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command; for a word that is none, an error that names those that may be meant."""
        word = args[0]
        is_option = word.startswith("-")
        kind = self.verbs[word].names if word in self.verbs else None
        if ctx.resilient_parsing and kind:
            # a shell completes the verb: load it only where more than its name is typed already
            command: click.Command | None = _NamesFirst(word, kind, self)
            if len(args) > 1 and (command := self.get_command(ctx, word)):
                first = next(each for each in command.params if isinstance(each, click.Argument))
                own = _name_argument(kind, first.nargs)
                params = [own if each is first else each for each in command.params]
                command = click.Command(word, params=params)
            return word, command, args[1:]
        begins = self.verbs[word].begins if word in self.verbs else ""
        # who asks for the help waits for nothing else
        if begins and not ctx.resilient_parsing and not {"-h", "--help"} & {*args}:
            log.say(begins)
        if not is_option and not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            # click's own suggestion knows only verbs that are loaded, and no other group; and
            # `help` and `version` are commands elsewhere and options here
            options = [name for parameter in self.get_params(ctx) for name in parameter.opts]
            here = {name: f"{ctx.command_path} {name}" for name in (*self.verbs, *options)}
            root = ctx.find_root()
            assert isinstance(root.command, VerbGroup)
            # a verb that stands in two groups is one command
            paths = reversed([*_paths(root.command, root.command_path)])
            others = {verb: path for path, verb in paths}
            names = {path.rpartition(" ")[2] for path in others.values()}
            # a verb of exactly this name is meant, wherever it stands
            alike = 1.0 if word.lower() in names else _NEAR
            near = [here[n] for n in get_close_matches(word.lower(), here, n=1, cutoff=alike)]
            if not near:
                [nearest] = get_close_matches(word.lower(), sorted(names), n=1) or [""]
                near = sorted(path for path in others.values() if path.endswith(f" {nearest}"))
            meant = " or ".join(f"`{each}`" for each in near)
            ctx.fail(f"No such command {word!r}." + (f" Did you mean {meant}?" if meant else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, each verb with a whole sentence."""
        # one width for all sections, so that the sentences stand in one column
        width = max(map(len, self.verbs))
        formatter.write_paragraph()
        for title, names in self.parts.items():
            # no empty line between two sections: the whole list fits a small screen
            formatter.write_heading(title)
            with formatter.indentation():
                formatter.write_dl([(f"{n:{width}}", self.verbs[n].summary) for n in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without loading every verb, as click's own does."""
        items = [
            CompletionItem(name, help=verb.summary)
            for name, verb in self.verbs.items()
            if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


class _NamesFirst(click.Command):
    """A verb whose first argument is completed before its module is loaded."""

    def __init__(self, name: str, kind: Kind, group: VerbGroup) -> None:
        super().__init__(name, params=[_name_argument(kind)])
        self._group = group

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Of its options, which its module has."""
        command = self._group.get_command(ctx, str(self.name))
        return command.shell_complete(ctx, incomplete) if command else []


def _name_argument(kind: Kind, nargs: int = 1) -> click.Argument:
    return click.Argument(
        ["named"],
        nargs=nargs,
        required=False,
        shell_complete=lambda ctx, param, incomplete: complete_names(kind, ctx, incomplete),
    )


def _paths(group: VerbGroup, path: str) -> Iterator[tuple[str, Verb]]:
    """Every command below a group, with the words that call it; none is loaded for that."""
    for name, verb in group.verbs.items():
        yield f"{path} {name}", verb
        if isinstance(inner := group.commands.get(name), VerbGroup):
            yield from _paths(inner, f"{path} {name}")


_MEANT = "sm120.meant"  # beside a context: the verb that is near to a word


class DefaultVerbGroup(VerbGroup):
    """A group whose first verb may be left out: `sm120 bench URL` is `sm120 bench run URL`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave options before the first word to the first verb: the group has none but help."""
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if args and args[0].startswith("-") and args[0] not in own:
            args = [next(iter(self.verbs)), *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of that name; for any other word the first."""
        return super().get_command(
            ctx, cmd_name if cmd_name in self.verbs else next(iter(self.verbs))
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Leave a word that is no verb to the first verb."""
        if args[0] in self.verbs:
            return super().resolve_command(ctx, args)
        near = get_close_matches(args[0].lower(), self.verbs, n=1, cutoff=_NEAR)
        ctx.meta[_MEANT] = f"{ctx.command_path} {near[0]}" if near else ""
        return super().resolve_command(ctx, [next(iter(self.verbs)), *args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Also what the first verb takes."""
        first = next(iter(self.verbs.values()))
        names = complete_names(first.names, ctx, incomplete) if first.names else []
        return [*super().shell_complete(ctx, incomplete), *names]

    def invoke(self, ctx: click.Context) -> Any:
        """Where the first verb cannot take such a word, name the verb that may be meant."""
        try:
            return super().invoke(ctx)
        except (click.UsageError, UnknownName) as error:
            if not (meant := ctx.meta.get(_MEANT)):
                raise
            question = f"Did you mean `{meant}`?"
            if isinstance(error, UnknownName):
                error.hint = f"{question} {error.hint}"
                raise
            message = f"{error.format_message().rstrip('.')}. {question}"
            raise click.UsageError(message, error.ctx) from error


_WEIGHTS_EPILOG = """\b
From a name to served weights:
  sm120 weights fit kimi-k2.6 --gpu-count 8 --mem-fraction 0.85
  sm120 weights lock kimi-k2.6
  sm120 weights fetch kimi-k2.6 --output /models/k26
  sm120 weights serve /models/k26"""
_BENCH_EPILOG = """\b
A recipe that is served, or any server:
  sm120 bench kimi-k26-vllm-8x
  sm120 bench http://127.0.0.1:8000 --workload long-8192-2048"""
_QUALITY_EPILOG = """\b
The first verb may be left out:
  sm120 quality http://127.0.0.1:8000 --weights /models/kimi
  sm120 quality http://trusted:8000 --record reference.json
  sm120 quality import results.json --published 0.89 --source URL"""
_HOST_EPILOG = """\b
Once for each system of your hosts, then for all of them:
  sm120 host lock --target ubuntu-24.04/amd64 --repository URL --keyring KEY
  sm120 host provision -i INVENTORY
  sm120 host verify -i INVENTORY"""

GROUPS = (
    VerbGroup("image", verbs=IMAGE, help="Lock, build, load and export engine images."),
    VerbGroup("source", verbs=SOURCE, help="Lock and compile engines from source."),
    VerbGroup("gate", verbs=GATE, help="Check without a GPU that an image runs on its card."),
    VerbGroup("catalogue", verbs=CATALOGUE, help="Find which engine release fits which card."),
    VerbGroup(
        "weights",
        verbs=WEIGHTS,
        help="Lock, fetch, verify, serve and fit model weights.",
        epilog=_WEIGHTS_EPILOG,
    ),
    VerbGroup(
        "recipe", verbs=RECIPE, help="List, show, render and serve recipes, and see how it went."
    ),
    DefaultVerbGroup(
        "quality",
        verbs=QUALITY,
        help="Compare what a server answers with what its model should.",
        epilog=_QUALITY_EPILOG,
    ),
    DefaultVerbGroup(
        "bench",
        verbs=BENCH,
        help="Measure how fast a server is, and how sure that is.",
        epilog=_BENCH_EPILOG,
    ),
    VerbGroup(
        "host",
        verbs=HOST,
        help="Provision GPU hosts and prove that they work.",
        epilog=_HOST_EPILOG,
    ),
    VerbGroup(
        "evidence", verbs=EVIDENCE, help="Make, sign and check statements about what was built."
    ),
    VerbGroup("registry", verbs=REGISTRY, help="Publish, pull and clean up images in a registry."),
    VerbGroup("store", verbs=STORE, help="Show, check and trim the store of layers and downloads."),
)
