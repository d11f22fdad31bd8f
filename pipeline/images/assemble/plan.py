"""What a build will do, worked out from specs, locks and the store before the first byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from pathlib import Path

from pipeline.artifacts.oci.document import TITLE
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import SpecInvalid, UnknownImage, UnknownSource
from pipeline.core.model import ForeignModel, Name, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.venv import Venv
from pipeline.images.lock.model import (
    BasePin,
    DebPin,
    ImageLock,
    LayerPin,
    Pin,
    SourceLock,
    WheelPin,
    current_lock,
    current_source_lock,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import Account, CompiledSpec, ImageSpec, SlimSpec, WarmSpec
from pipeline.images.spec.source import BuildSpec, OutputSpec, SourceSpec

# Raised when the same inputs would give other bytes; part of every layer's key.
FORMAT = 1
# Raised when the same source, toolchain and steps would give another compiled tree.
TREE_FORMAT = 1
# Fields of a build that only help to plan or to judge it: they decide none of its bytes. The
# toolchain's own key covers its platform, and `TreePlan.inputs` lists the outputs separately.
BUILD_HINTS = frozenset({"cpu_minutes", "job_memory_mb", "silent_minutes", "platforms"})
BUILD_HINTS |= {"may_differ", "toolchain_platform", "outputs", "cpu_checked"}
# Raised when the same kernels, cases and card would give another warm layer.
WARM_FORMAT = 4
# Raised when the same foreign layer would be listed otherwise.
READER = 1
# A wheel this large has a layer of its own, shared between images and pushed once.
BIG_WHEEL_BYTES = 16_000_000
# below the 127 that engines mount, with room for the layers of images built on it
MOST_LAYERS = 100
DEFAULT_VENV = Venv()
_PREFIX = "org.opencontainers.image."
_IMAGES = Path(__file__).parents[1]
# Calls an engine's functions where no card is, for gates and for warm layers.
GATE_WORKER = _IMAGES / "gate/worker"
# Keeps what these calls compile, and compiles modules of FlashInfer.
WARM_WORKER, MODULE_COMPILER = _IMAGES / "warm/inside", _IMAGES / "warm/compiler"
# What an image with warm kernels reads them by.
WARM_READER = _IMAGES / "warm/reader/sm120_warm.py"
# By this name FlashInfer looks for modules that are compiled already.
MODULE_READER = WARM_READER.with_name("flashinfer_jit_cache.py")
# Raised when the same module, wheels and architectures would give another library.
MODULE_FORMAT = 2
# Where its Python finds what was compiled of its files, and the program that compiles them.
PYCACHE = "opt/warm/python"
BYTECODE = _IMAGES / "warm/python/bytecode.py"


class _SharedCases(ForeignModel):
    """What a plan needs of an engine.yaml; gates read all of it."""

    shared: Name | None = None


class LayerKind(Enum):
    """What a layer is made of."""

    ROOT = "debian root"
    DEBS = "debs"
    WHEELS = "wheels"


@dataclass(frozen=True)
class LayerPlan:
    """A layer whose bytes follow from locked files alone."""

    title: str
    kind: LayerKind
    architecture: str
    pins: tuple[Pin, ...]
    venv: Venv = DEFAULT_VENV
    prefer: tuple[str, ...] = ()
    rewrite_record: tuple[str, ...] = ()
    accounts: tuple[Account, ...] = ()
    # of a slim image: files of its wheels that are left out, by patterns
    without: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def key(self) -> str:
        """The digest of everything that decides the layer's bytes."""
        parts: dict[str, object] = {
            "format": FORMAT,
            "kind": self.kind.value,
            # a wheel's file name has its platform; pure ones give one layer for both
            "architecture": self.architecture if self.kind is not LayerKind.WHEELS else "",
            # neither address nor path: a mirror may move files
            "pins": [[p.file, p.sha256] for p in self.pins],
            "venv": [self.venv.version, self.venv.root],
            "prefer": self.prefer,
            "rewrite_record": self.rewrite_record,
            "accounts": [a.model_dump() for a in self.accounts],
        }
        if self.without:
            parts["without"] = self.without
        return sha256_of(canonical_json(parts))

    @property
    def input_bytes(self) -> int:
        return sum(p.size_bytes for p in self.pins)


@dataclass(frozen=True)
class TreePlan:
    """A source compiled in one way for one platform."""

    source: SourceSpec
    name: str  # of the build
    platform: str
    lock: SourceLock
    toolchain: ImagePlan
    own: tuple[str, ...]  # the digests of our files and patches, in their order

    @property
    def build(self) -> BuildSpec:
        return self.source.builds[self.name]

    @property
    def outputs(self) -> list[OutputSpec]:
        """The results of compiling: those of every build of the source, then its own."""
        return [*self.source.outputs, *self.build.outputs]

    @property
    def title(self) -> str:
        return f"{self.source.name} ({self.name})"

    @cached_property
    def inputs(self) -> dict[str, object]:
        """All that decides its bytes, by name, without the fields that only help to plan."""
        return {
            "format": TREE_FORMAT,
            "platform": self.platform,
            "tree": self.lock.tree,
            "build": self.build.model_dump(mode="json", by_alias=True, exclude={*BUILD_HINTS}),
            "outputs": [x.model_dump(mode="json", by_alias=True) for x in self.outputs],
            "files": [[file.to, file.mode] for file in self.source.files],
            "own": list(self.own),
            "toolchain": self.toolchain.key,
        }

    @cached_property
    def key(self) -> str:
        """The store keeps its layer under this key."""
        return sha256_of(canonical_json(self.inputs))


@dataclass(frozen=True)
class WarmPlan:
    """The kernels of an image's engine, compiled for its card."""

    image: str
    base: ImagePlan
    spec: WarmSpec
    cases: tuple[tuple[str, str], ...]  # the files of its base's cases, with their digests
    reader: str  # the digest of what reads the entries in the image
    bytecode: str  # and of what compiles its Python files
    arch: str = ""  # another card than the image's own
    module_reader: str = ""  # the digest of what offers FlashInfer its modules
    programs: tuple[str, ...] = ()  # the digests of what calls and compiles

    @property
    def title(self) -> str:
        return f"{self.image} warm kernels"

    @property
    def card(self) -> str:
        return self.arch or self.base.spec.main_arch

    @cached_property
    def inputs(self) -> dict[str, object]:
        """All that decides its bytes, by name: Triton, flags, paths and sources are its base's."""
        decided: dict[str, object] = {
            "format": WARM_FORMAT,
            "base": self.base.key,
            "card": self.card,
            "cases": [list(pair) for pair in self.cases],
            "recipes": self.spec.recipes,
            "reader": self.reader,
            "bytecode": self.bytecode,
        }
        if modules := [each.model_dump() for each in self.spec.modules]:
            decided["modules"] = [MODULE_FORMAT, self.module_reader, modules]
        return decided

    @cached_property
    def key(self) -> str:
        """The store keeps its layer under this key.

        Other programs of ours may make other entries. They are no input: most changes of them make
        the same, and an image's digest covers its inputs.
        """
        return sha256_of(canonical_json({**self.inputs, "programs": self.programs}))


@dataclass(frozen=True)
class ImagePlan:
    """One image for one platform: its spec, its lock, and the layers that come from pins."""

    spec: ImageSpec
    platform: str
    lock: ImageLock
    layers: tuple[LayerPlan, ...]
    base: ImagePlan | None
    inputs: dict[str, object]  # all that decides the image, by name
    trees: tuple[TreePlan, ...] = ()
    warm: WarmPlan | None = None
    slim: SlimSpec | None = None  # what it leaves out, with all that it stands on

    @cached_property
    def key(self) -> str:
        """The digest of everything that decides the image: `nothing to do` depends on it."""
        return sha256_of(canonical_json(self.inputs))

    @property
    def architecture(self) -> str:
        return self.platform.partition("/")[2]

    @property
    def venv(self) -> Venv:
        if self.spec.python:
            return Venv(version=self.spec.python.version)
        # an image without wheels of its own has the environment of its base
        return self.base.venv if self.base else Venv()

    def chain(self) -> list[ImagePlan]:
        """The plans from the root image to this one."""
        return [*(self.base.chain() if self.base else []), self]

    @property
    def variables(self) -> dict[str, str]:
        """The environment that the image and those below it set."""
        return {k: v for plan in self.chain() for k, v in plan.spec.env.items()}

    @property
    def foreign(self) -> BasePin | None:
        """The foreign image at the bottom of the chain, if there is one."""
        return self.chain()[0].lock.base_image

    @property
    def wheels(self) -> list[WheelPin]:
        """Its own wheels: those of its lock that are in the image."""
        left_out = self.slim.wheels if self.slim else ()
        return [pin for pin in self.lock.wheels if pin.name not in left_out]

    @property
    def debs(self) -> list[DebPin]:
        """Its own Debian packages."""
        left_out = self.slim.debs if self.slim else ()
        return [pin for pin in self.lock.debs if pin.name not in left_out]

    def find_wheel(self, project: str) -> WheelPin | None:
        """The wheel of a project that counts in the image: its own, else that of its base."""
        own = next((pin for pin in self.wheels if pin.name == project), None)
        return own or (self.base.find_wheel(project) if self.base else None)

    @property
    def entrypoint(self) -> list[str]:
        """What the image starts: its own program, else that of its base."""
        return self.spec.entrypoint or (self.base.entrypoint if self.base else [])

    @property
    def notes(self) -> dict[str, str]:
        """What registries and people read, the same in labels and in the manifest."""
        spec, base = self.spec, self.lock.base_image
        notes = {
            TITLE: spec.name,
            f"{_PREFIX}description": spec.summary,
            "sm120.format": str(FORMAT),
            "sm120.lock": self.lock.seal,
            "sm120.inputs": self.key,
        }
        if spec.parent:
            notes[f"{_PREFIX}base.name"] = spec.parent
        if base:
            notes |= {f"{_PREFIX}base.name": base.repository}
            notes |= {f"{_PREFIX}base.digest": base.manifest.digest}
        if spec.cuda and spec.cuda.architectures:
            notes["sm120.architectures"] = ",".join(spec.cuda.architectures)
        if spec.python:
            # the first requirement is the engine, pinned with ==
            notes[f"{_PREFIX}version"] = spec.python.requirements[0].partition("==")[2]
        return {**notes, **spec.labels}

    def all_layers(self) -> list[LayerPlan]:
        return [layer for plan in self.chain() for layer in plan.layers]

    def all_trees(self) -> list[TreePlan]:
        return [tree for plan in self.chain() for tree in plan.trees]


def plan_image(checkout: Checkout, name: str, platform: str) -> ImagePlan:
    """Everything that can be known without network or disk work; refuses stale locks."""
    specs = checkout.chain(name, platform)
    slim = specs[-1].slim if specs[-1].is_slim else None
    plan: ImagePlan | None = None
    for spec in specs:
        plan = _plan_on(checkout, spec, platform, plan, slim)
    if plan is None:
        raise UnknownImage(f"there is no image {name!r}")
    for field in ("debs", "wheels", "files") if slim else ():
        locked = {p.name for each in plan.chain() for p in each.lock.pins}
        # a package that moved or was renamed would quietly stay in the image
        if strange := sorted({*getattr(slim, field)} - locked):
            raise SpecInvalid(
                f"{name}: slim: {field}: {strange[0]} is not in the locks of {name}",
                "Their files under lockfiles/images name what is.",
            )
    return plan


def _plan_on(
    checkout: Checkout,
    spec: ImageSpec,
    platform: str,
    base: ImagePlan | None,
    slim: SlimSpec | None,
) -> ImagePlan:
    folder = checkout.folder(spec.name)
    for file in spec.files:
        if not (folder / file.source).is_file():
            raise SpecInvalid(f"{spec.name}: files: {file.source} is not in the image's folder")
    lock = current_lock(checkout, spec, platform)
    plan = ImagePlan(spec, platform, lock, (), base, {}, slim=slim)
    layers = tuple(_layers(plan))
    trees = tuple(plan_tree(checkout, each, platform) for each in spec.compiled)
    series, patches = checkout.series(spec), (folder / (spec.patches or "")).parent
    # by name, so that a golden digest can report which of them changed
    inputs: dict[str, object] = {
        "format": FORMAT,
        "spec": sha256_of(canonical_json(spec.dumped())),
        "lock": lock.seal,
        "base": base.key if base else None,
        "files": [_file_digest(folder / file.source) for file in spec.files],
        "patches": [_file_digest(patches / p.file) for p in series.patches],
        "series": sha256_of(canonical_json(series.model_dump(mode="json"))),
    }
    if slim:
        inputs["slim"] = slim.model_dump(mode="json")
    if trees:
        inputs["compiled"] = [tree.key for tree in trees]
    warm = None
    if spec.warm and base:
        owner = base.spec.name
        # compiled once, with all that compiles: the same layer for the slim image
        full = plan_image(checkout, owner, platform) if slim else base
        setup = checkout.folder(owner) / "gates/engine.yaml"
        if not setup.is_file():
            raise SpecInvalid(
                f"{spec.name}: warm: {owner} has no cases of a shared-memory gate",
                "Kernels are compiled for the calls that gates/smem-*.yaml of its base describe.",
            )
        # engine.yaml may name a folder of cases that several images share
        shared = read_yaml(setup, _SharedCases).shared
        folders = [f"common/gates/{shared}"] if shared else []
        paths = [
            path
            for name in (*folders, f"{owner}/gates")
            for pattern in ("engine.yaml", "smem-*.yaml")
            for path in sorted(checkout.folder(name).glob(pattern))
        ]
        cases = tuple((f"{path.parent.name}/{path.name}", _file_digest(path)) for path in paths)
        reader, bytecode, offers = map(_file_digest, (WARM_READER, BYTECODE, MODULE_READER))
        programs = tuple(map(program_digest, (GATE_WORKER, WARM_WORKER, MODULE_COMPILER)))
        name = checkout.written(spec.name)
        warm = WarmPlan(
            name, full, spec.warm, cases, reader, bytecode, module_reader=offers, programs=programs
        )
        inputs["warm"] = warm.inputs
    plan = replace(plan, layers=layers, inputs=inputs, trees=trees, warm=warm)
    # refuses an image on a base with too many layers before anything is fetched
    foreign_layers = len(plan.foreign.layers) if plan.foreign else 0
    require_few(spec.name, len(plan.all_layers()) + len(plan.all_trees()) + foreign_layers)
    return plan


def plan_tree(checkout: Checkout, compiled: CompiledSpec, platform: str) -> TreePlan:
    """What a compiled tree is made of; refuses a stale lock, and a toolchain compiled itself."""
    source = checkout.source(compiled.source)
    build = source.builds.get(compiled.build)
    if build is None:
        known = ", ".join(source.builds)
        raise UnknownSource(f"{source.name}: has no build {compiled.build!r} (it has: {known})")
    if platform not in build.platforms:
        raise SpecInvalid(
            f"{source.name}: its build {compiled.build} is not for {platform}",
            f"It is for {', '.join(build.platforms)}; `sm120 source list` shows every build.",
        )
    lock = current_source_lock(checkout.source_lock_path(source.name), source)
    runs_on = build.toolchain_platform or platform
    if runs_on not in checkout.spec(build.toolchain).platforms:
        raise SpecInvalid(f"{source.name}: toolchain: {build.toolchain} is not for {runs_on}")
    toolchain = plan_image(checkout, build.toolchain, runs_on)
    if toolchain.all_trees():
        raise SpecInvalid(
            f"{source.name}: toolchain: {build.toolchain} holds compiled trees; use one of packages"
        )
    folder = checkout.source_folder(source.name)
    names = [*(f.source for f in source.files), *(p.file for p in source.patches)]
    own = tuple(_file_digest(folder / name) for name in names)
    if "missing" in own:
        absent = names[own.index("missing")]
        raise SpecInvalid(f"{source.name}: {absent} is not in the source's folder")
    return TreePlan(source, compiled.build, platform, lock, toolchain, own)


def require_few(name: str, layers: int) -> None:
    """Container engines stop at about 127 layers, and some tools earlier."""
    if layers >= MOST_LAYERS:
        raise SpecInvalid(f"{name}: has {layers} layers, at most {MOST_LAYERS - 1} are allowed")


def _layers(plan: ImagePlan) -> Iterator[LayerPlan]:
    """A layer for all .debs, one for each big wheel in order of name, one for all small wheels."""
    spec, architecture, debs = plan.spec, plan.architecture, plan.debs
    if debs:
        kind = LayerKind.ROOT if spec.debian else LayerKind.DEBS
        title = f"{len(debs)} {'' if spec.debian else 'more '}Debian packages"
        yield LayerPlan(title, kind, architecture, tuple(debs), accounts=tuple(spec.accounts))
    if spec.python is None:
        return
    small = tuple(w for w in plan.wheels if w.size_bytes < BIG_WHEEL_BYTES)
    groups: list[tuple[WheelPin, ...]] = [(w,) for w in plan.wheels if w not in small]
    patterns = plan.slim.files if plan.slim else {}
    for pins in [*groups, small] if small else groups:
        names = {w.name for w in pins}
        title, prefer = f"{pins[0].name} {pins[0].version}", tuple[str, ...]()
        if pins is small:
            title = f"{len(small)} small wheels"
            prefer = tuple(n for n in spec.python.prefer if n in names)
        venv, untrue = Venv(version=spec.python.version), names & set(spec.python.rewrite_record)
        wheels, record = LayerKind.WHEELS, tuple(sorted(untrue))
        without = tuple((n, tuple(patterns[n])) for n in sorted(names & patterns.keys()))
        yield LayerPlan(title, wheels, architecture, pins, venv, prefer, record, without=without)


@cache
def program_digest(folder: Path) -> str:
    """The digest of a program of ours; what it made or answered is asked again after a change."""
    files = {str(f.relative_to(folder)): _file_digest(f) for f in folder.rglob("*.py")}
    return sha256_of(canonical_json(files))


def _file_digest(path: Path) -> str:
    return sha256_of(path.read_bytes()) if path.is_file() else "missing"


@dataclass(frozen=True)
class Work:
    """The work that remains for a set of images."""

    missing: tuple[LayerPlan, ...]
    cached: tuple[LayerPlan, ...]
    fetch: tuple[Pin, ...]
    bases: tuple[BasePin, ...] = ()  # foreign ones, of which something is missing
    base_bytes: int = 0  # to be fetched of them

    @property
    def fetch_bytes(self) -> int:
        return sum(p.size_bytes for p in self.fetch)

    @property
    def disk_bytes(self) -> int:
        """Room for the downloads in flight and for the layers that stay."""
        layers = sum(layer_bytes_guess(layer) for layer in self.missing)
        # downloads in flight, at their worst; big ones are removed once they are a layer
        largest = sorted((p.size_bytes for p in self.fetch), reverse=True)[:8]
        small = sum(p.size_bytes for p in self.fetch if p.size_bytes < BIG_WHEEL_BYTES)
        return layers + sum(largest) + small + self.base_bytes


def layer_bytes_guess(layer: LayerPlan) -> int:
    """A wheel's layer has the wheel's size; .debs grow, as xz packs tighter than gzip."""
    return int(layer.input_bytes * (1.01 if layer.kind is LayerKind.WHEELS else 1.5))


def foreign_key(layer: LayerPin) -> str:
    """The store keeps the contents of a foreign base's layer under this key."""
    # in one table with our own layers, so the first part keeps the keys apart
    parts = ["foreign layer", READER, layer.digest, layer.diff_id, layer.media_type]
    return sha256_of(canonical_json(parts))


def work_for(plans: Sequence[ImagePlan], store: Store) -> Work:
    """Which layers are missing and which files must be fetched for them."""
    by_key = {layer.key: layer for plan in plans for layer in plan.all_layers()}
    cached = [layer for layer in by_key.values() if store.layer(layer.key)]
    missing = [layer for layer in by_key.values() if not store.layer(layer.key)]
    pins: dict[str, Pin] = {p.sha256: p for layer in missing for p in layer.pins}
    fetch = [p for p in pins.values() if not store.has_input(p.sha256, p.size_bytes)]
    lacking = []
    for base in {str(p.foreign): p.foreign for p in plans if p.foreign}.values():
        sizes = [(store.blob_path(x.digest), x.size_bytes) for x in base.documents]
        is_whole = all(path.exists() and path.stat().st_size == n for path, n in sizes)
        if not is_whole or not all(store.layer(foreign_key(layer)) for layer in base.layers):
            lacking.append(base)
    blobs = {x.digest: x.size_bytes for b in lacking for x in (*b.documents, *b.blobs)}
    absent = sum(n for digest, n in blobs.items() if not store.blob_path(digest).exists())
    return Work(tuple(missing), tuple(cached), tuple(fetch), tuple(lacking), absent)
