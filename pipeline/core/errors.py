"""Every way this pipeline can fail: families with an exit code each, and the kinds below them.

A script branches on the exit code; `--json` and the docs also name the kind, which is the class.
The docstring of a class is its meaning: the docs print their table of exit codes from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# More names than these hide what happened.
_MOST_NAMES = 16


def there_are(wanted: str, known: Iterable[str]) -> str:
    """Names that exist, for a message about an unknown one: all of a few, the nearest of many."""
    names = list(known)
    if len(names) <= _MOST_NAMES:
        return f"there are: {', '.join(names) or 'none'}"
    near = [name for name in names if wanted in name] or get_close_matches(wanted, names, n=5)
    nearest = f"; the nearest: {', '.join(near[:_MOST_NAMES])}" if near else ""
    return f"there are {len(names)}{nearest}"


def did_you_mean(near: list[str]) -> str:
    """Begins a hint; empty where nothing looks like what the user typed."""
    return f"Did you mean {' or '.join(near)}? " if near else ""


class PipelineError(Exception):
    """What happened (the message), what to try (the hint), how the process ends (the code)."""

    exit_code = 1
    meaning = "something failed that has no code of its own"
    hint = ""

    def __init_subclass__(cls, code: int | None = None) -> None:
        """Takes the meaning from the docstring; a family also names its exit code."""
        cls.meaning = cls.__doc__ or cls.meaning
        if code is not None:
            cls.exit_code = code

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints on stderr."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            # one line: a log that is read by line keeps the message whole
            "message": " ".join(str(self).split()),
            "hint": self.hint,
        }


# Codes leave out those that a shell or click gives a meaning of its own (2, 126 and above), and go
# by decades: 10 specs and locks, 20 servers, 30 contents, 40 this machine, 50 gates, 60 weights,
# 70 evidence, 80 hosts, 90 served models and plans.


class InputInvalid(PipelineError, code=10):
    """a spec, another file or an argument is not valid"""


class SpecInvalid(InputInvalid):
    """a spec, such as image.yaml or series.yaml, or an argument is not valid"""

    hint = "Correct the spec at the place that is named."


class RecipeInvalid(InputInvalid):
    """a recipe, or a value given in place of one of its fields, is not valid"""

    hint = "Fix the named field; `sm120 image schema recipe` prints what the file may hold."


class PlanInvalid(InputInvalid):
    """a plan for `sm120 run` has stages that cannot be run as they are"""

    hint = "Correct the stage that is named; `sm120 image schema plan` prints the format."


class BundleInvalid(InputInvalid):
    """a folder is no bundle, or one for another machine"""

    hint = "Name a folder that `sm120 bundle` made for this machine."


class GateInvalid(InputInvalid):
    """a gate's case file is missing or not valid"""

    hint = "Fix the named field; `sm120 image schema gate` prints what the file may hold."


# Not of the evidence's decade: the file is the verifier's own input, and nothing was judged yet.
class TrustInvalid(InputInvalid):
    """a trust or policy file is missing or not valid"""

    hint = "`sm120 evidence trust-key FILE.pub --trust FILE` adds a key."


class FactsUnreadable(InputInvalid):
    """a file of host facts, a capture or a test result is damaged or of another kind"""

    hint = "Make it again with `sm120 host facts` (--capture, --json) or `sm120 host check --json`."


class ReferenceInvalid(InputInvalid):
    """the name of an image in a registry is not valid or not complete"""

    hint = "Write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:…, registry included."


class AttachmentInvalid(InputInvalid):
    """a file to attach to an image is missing, too large or has no type"""

    hint = "Write --attach FILE:TYPE, e.g. sbom.json:application/vnd.cyclonedx+json."


class WorkloadInvalid(InputInvalid):
    """a benchmark's workload is not valid, or its numbers would mislead"""

    hint = "Correct what is named; `sm120 bench list` shows the shipped workloads."


class RunInvalid(InputInvalid):
    """the result of a benchmark is damaged, was edited or is not there"""

    hint = "Name a run's folder, with bench.json and requests.jsonl; get a damaged one again."


class ReportInvalid(InputInvalid):
    """a file is no report of this tool, or its embedded data cannot be read"""

    hint = "`sm120 report RUN` makes it again from the run."


class TemplateUnusable(InputInvalid):
    """a model's chat template or tokenizer is missing, damaged or does what no template may"""

    hint = "Compare its files with their lock: `sm120 weights verify`."


class ScoresInvalid(InputInvalid):
    """a file is no result of lm-eval, evalscope or inspect-ai, or a reference is none of ours"""

    hint = "Name the file as the program wrote it; docs/quality.md lists the forms."


# A code of its own: CI tells "lock again and commit" from a spec that a person must correct.
class LockUnusable(PipelineError, code=11):
    """a lock is missing, out of date or was changed by hand"""

    state = "unusable"  # in a list of locks


class LockMissing(LockUnusable):
    """an image, a weights set or the hosts have no lock"""

    hint = "Make it with `sm120 image lock`, `sm120 weights lock` or `sm120 host lock`."
    state = "missing"


class LockStale(LockUnusable):
    """a lock was made for an older spec"""

    hint = "`sm120 image lock --dry-run` shows what would change; `sm120 image lock` renews it."
    state = "stale"


class LockEdited(LockUnusable):
    """a lock was changed by hand or is damaged"""

    hint = "Restore the committed file (`git checkout lockfiles`), or lock it again."
    state = "edited"


class LocksDisagree(LockEdited):
    """two locks of one commit name different contents"""


class UpstreamMoved(LockUnusable):
    """the document that a recipe comes from has changed since the commit that the recipe names"""

    hint = "Look at what changed; `sm120 recipe import REPO@COMMIT:PATH` takes it over anew."


class Unresolvable(PipelineError, code=12):
    """no packages satisfy a spec"""


class ResolveFailed(Unresolvable):
    """no set of wheels or .debs satisfies the spec"""

    hint = "Correct or loosen what the spec asks for, as the message says."


class UnknownPackage(Unresolvable):
    """a Debian package is in no index that was read"""


# 20, 21 and 22 are apart because the next step differs: try again, distrust the source, connect.
class Unreachable(PipelineError, code=20):
    """no server that was named could deliver a file"""


class SourceUnreachable(Unreachable):
    """no configured source could deliver a locked file"""

    hint = "Check the network and `sm120 image sources`, then run it again; finished files stay."


class RegistryUnreachable(Unreachable):
    """a registry does not answer, or answers only with server errors"""

    hint = "Check its name, the network and its CA (--ca), then run it again."


class MirrorUnknown(Unreachable):
    """no Debian mirror is configured on this machine"""

    hint = "Set SM120_DEBIAN_MIRROR to the address of a Debian mirror."


class BaseUnplaced(Unreachable):
    """a foreign base image is needed, and no registry for it is named"""

    hint = "Name one with --base-registry REGISTRY[/PREFIX], or in SM120_BASE_REGISTRIES."


class SourceMismatch(PipelineError, code=21):
    """a server delivered something other than what was locked, signed or announced"""


class DigestMismatch(SourceMismatch):
    """a source delivered other bytes than the lock names"""

    hint = "Nothing was kept. Upstream changed under a fixed name: compare, then lock again."


class RevisionMoved(SourceMismatch):
    """a repository changed while it was read, or no longer has the locked commit"""

    hint = "`sm120 weights lock NAME --dry-run` shows what changed; without it, it locks again."


# Of a Debian archive; signatures of evidence and of weights are in the 70s.
class SignatureInvalid(SourceMismatch):
    """a Release file's signature is missing, wrong or by an unknown key"""

    hint = "Nothing was used. Another mirror may help; a private one needs its keyring named."


class IndexBroken(SourceMismatch):
    """an index or Release file is damaged, expired or contradicts itself"""

    hint = "Nothing was used. Try again later or another mirror."


class HubBroken(SourceMismatch):
    """the Hub's answer is damaged or contradicts itself"""

    hint = "Nothing was kept. Try again later, or another HF_ENDPOINT."


class RegistryBroken(SourceMismatch):
    """a registry's answer is damaged or contradicts itself"""

    hint = "Nothing of it was used. Try again; if it happens again, tell the registry's owner."


# Not a failure of a server: none was asked.
class OfflineMiss(PipelineError, code=22):
    """--offline, and a needed file is not in the store"""

    hint = "Run once without --offline, or name a folder that has it with --mirror."


class AccessRefused(PipelineError, code=23):
    """the Hub or a registry does not let this user do that"""


class HubRefused(AccessRefused):
    """the Hub does not let this user have a repository, a revision or a file"""

    hint = "Accept the licence on the model's page, and set HF_TOKEN or run `hf auth login`."


class RegistryRefused(AccessRefused):
    """a registry does not let this user do that"""

    hint = "`docker login REGISTRY` keeps a login where this command looks for it."


# Not RegistryRefused: a login does not help where the registry itself forbids it.
class DeleteDisabled(AccessRefused):
    """a registry does not allow deleting"""

    hint = "Its owner can: docker-registry needs `storage: delete: enabled: true`."


class ContentUnusable(PipelineError, code=30):
    """a package, a base image or a model file is damaged, hostile or not supported"""


class CorruptArchive(ContentUnusable):
    """a wheel, .deb or base layer is damaged or contradicts itself"""

    hint = "Nothing was kept. The published file itself is bad: pick another version."


class HostileArchive(ContentUnusable):
    """a wheel, .deb or base layer tries to write outside its own folder"""

    hint = "Nothing was kept. Do not use this package version; report it to its authors."


class BaseUnusable(ContentUnusable):
    """a foreign base image is for another platform, of no supported kind or contradictory"""

    hint = "Nothing was built on it. Name the digest of another image under `base`."


class DatabaseInvalid(ContentUnusable):
    """an advisory database is damaged, hostile or in no format that is published"""

    hint = "Nothing was judged. Fetch the database again: OSV's all.zip, or Debian's tracker dump."


class ModelUnreadable(ContentUnusable):
    """a config.json or GGUF header is damaged or of a kind this tool does not know"""


class ParserUnreadable(ContentUnusable):
    """the argument parser of an engine could not be read out of its image"""

    hint = "`sm120 image rebuild IMAGE` shows whether the image is whole."


class Conflict(PipelineError, code=31):
    """two packages, or a patch and the file it changes, contradict each other"""


# pip lets the last wheel win, so that an image would depend on the order of installation.
class PathConflict(Conflict):
    """two wheels write one path with different bytes"""

    hint = "Name the one that must win under `python: prefer:` in image.yaml."


class PatchConflict(Conflict):
    """a patch does not fit the file it is for"""

    hint = "Redo the patch for this version; no fuzz and no offset is allowed."


class OutputDiffers(PipelineError, code=32):
    """a build gave other bytes than before, or no golden digest is committed yet"""


# Also of an image that has none: an uncompared build must not look like one that matched.
class GoldenMismatch(OutputDiffers):
    """a build gave another digest than the committed one, or none is committed yet"""

    hint = "If the image is new or changed on purpose: `sm120 build IMAGE --accept`."


class NotReproducible(OutputDiffers):
    """a rebuild gave other bytes"""

    hint = "The first difference is named above; keep both layouts and report it."


class CompileFailed(PipelineError, code=33):
    """a source did not compile, or not to what its spec promises"""


class StepFailed(CompileFailed):
    """a step of a source's build failed, hung, or ran out of memory or disk"""

    hint = "The log named above holds all of its output; finished objects are kept."


class OutputWrong(CompileFailed):
    """a compiled tree lacks a file, or holds other machine code than its spec promises"""

    hint = "Correct `outputs`, `architectures` or `cpu` in source.yaml, or the build's flags."


class StoreUnusable(PipelineError, code=40):
    """the store, or the disk it is on, cannot be used as it is"""


class StoreUnwritable(StoreUnusable):
    """a file or folder, of the store or another one, cannot be used: owner, mode or kind"""

    hint = "Change its owner or mode, or name another place; SM120_STORE names that of the store."


class DiskFull(StoreUnusable):
    """not enough disk space"""

    hint = "Free some space; for the store, `sm120 store trim` does. What was finished is kept."


class StoreDamaged(StoreUnusable):
    """a file in the store does not match the hash in its name"""

    hint = "`sm120 store check --repair` removes damaged files; the next build makes them again."


# Apart from StoreDamaged: `store check --repair` must never remove what may be a user's folder.
class FolderInTheWay(StoreDamaged):
    """a folder is where the store keeps a file"""

    hint = "Look at what it is and move it away; the next build makes the file."

    def __init__(self, path: object) -> None:
        super().__init__(f"{path}: is a folder, where the store has a file")


# `store trim` and `check --repair` delete below it: other people's folders are never taken for one.
class NotAStore(StoreUnusable):
    """the folder named as the store holds other things"""

    hint = "Nothing in it was touched. Name a new or empty folder with --store or SM120_STORE."


class UnknownName(PipelineError, code=41):
    """there is no image, checkout, weights set, tag or digest of that name"""


class UnknownImage(UnknownName):
    """there is no such image, or it is not built yet"""

    hint = "`sm120 image list` lists them; `sm120 build IMAGE` builds one."


class UnknownFile(UnknownName):
    """a built image has no such file, or it is not one that can be printed"""

    hint = "`sm120 image files IMAGE` lists its files."


class ImageStale(UnknownName):
    """an image was built from another spec, lock or patches than the checkout has now"""

    hint = "`sm120 build IMAGE` builds it again; --accept takes a digest that changed."


class UnknownSource(UnknownName):
    """there is no such source to compile, or no such build of it"""

    hint = "`sm120 source list` shows what there is."


class UnknownRecipe(UnknownName):
    """there is no such recipe"""

    hint = "`sm120 recipe list` shows what there is; --recipes DIR adds a folder of your own."


class UnknownReference(UnknownName):
    """no published tables of that name ship with this tool"""

    hint = "`sm120 report --list-references` shows what there is."


class NoCheckout(UnknownName):
    """no checkout was found"""

    hint = "Run it in the checkout, or name it with --checkout."


class WeightsUnknown(UnknownName):
    """there is no such weights set, or the folder holds none that is known"""

    hint = "`sm120 weights list` shows the sets this checkout knows."


class NotInRegistry(UnknownName):
    """a registry holds no such repository, tag or digest"""

    hint = "`sm120 registry tags REGISTRY/REPOSITORY` shows its tags."


class NothingServed(UnknownName):
    """no container of that recipe is there"""

    hint = "`sm120 recipe status` shows what is served; `sm120 serve RECIPE` starts one."


class ToolUnavailable(PipelineError, code=42):
    """a program, Docker or a port that this step needs is not available"""


class MissingTool(ToolUnavailable):
    """a program this step needs is not installed"""


class PrintFailed(ToolUnavailable):
    """the browser that was asked to print a PDF failed"""

    hint = "Open the HTML file in a browser and print it: its style sheet has rules for paper."


class DockerUnavailable(ToolUnavailable):
    """the Docker daemon does not answer"""

    hint = "Start Docker, or set DOCKER_HOST. Building and `sm120 image export` need no Docker."


class PodmanUnavailable(DockerUnavailable):
    """Podman does not answer, or did not do what it was asked"""

    hint = "`podman info` shows whether it works for this user; its own reason stands above."


class SlurmUnavailable(ToolUnavailable):
    """Slurm took no job, or started none"""

    hint = "`sinfo` shows partitions and nodes, `squeue` what waits."


class SandboxUnavailable(ToolUnavailable):
    """nothing on this machine can compile without network and out of reach of your files"""

    hint = "Allow user namespaces, run it as root, or install Docker or Podman."


class AddressUnusable(ToolUnavailable):
    """a server cannot listen on its address, or its token or certificate cannot be used"""

    hint = "Choose another --port or --host; `ss -ltnp` shows which program uses a port."


class GateNotPassed(PipelineError, code=50):
    """an image does not run well on the target card, or a patch does not help"""


class GateFailed(GateNotPassed):
    """a kernel of an image needs more shared memory than the target card has"""

    hint = "Patch its block sizes (`sm120 gate tune IMAGE CASE`), or accept it with a reason."


class GateWrong(GateNotPassed):
    """a kernel of an image computes wrong numbers"""

    hint = "`sm120 gate run IMAGE --unpatched` shows whether a patch is at fault."


class ParserWrong(GateNotPassed):
    """a parser of an image loses or changes what a model answers"""

    hint = "Patch the parser, or accept the case in gates/parsers.yaml with a reason and a link."


class TemplateWrong(GateNotPassed):
    """an image renders a conversation otherwise than its model's chat template"""

    hint = "Patch the engine, or accept the case in gates/templates.yaml with a reason and a link."


class NoKernelImage(GateNotPassed):
    """an object of an image holds no code that the target card can run"""

    hint = "Take a build made for the card, or accept it with a reason in gates/arch.yaml."


class PatchUnproved(GateNotPassed):
    """a patch is not needed, does nothing or does not do enough"""

    hint = "Drop a superseded patch, redo an inert one; `no_gate` is for one without a kernel."


class BumpWaits(GateNotPassed):
    """a newer version of an engine was judged, and must not be taken as it is"""

    hint = "The page that was written says what failed, which patches it needs and what moves."


# Never counted as passed, and not as failed either: CI may retry this, but not 50.
class NotCovered(GateNotPassed):
    """a slim image would lack what its recipes need: kernels are missing, or nobody knows"""

    hint = "`sm120 image warm IMAGE --report` shows all; the whole image compiles what is missing."


class GateUndecided(PipelineError, code=51):
    """a gate could not be judged"""


class GateUnknown(GateUndecided):
    """a gate could not be judged: nothing failed, but some cases have no result"""

    hint = "Each unknown case above gives its reason; unknown never counts as passed."


class CaseNotFound(GateUndecided):
    """no case of a gate judges a kernel"""

    hint = "`sm120 gate run IMAGE --discover` lists the kernels without a case; docs/gates.md."


# This tells nothing about the image, only about the machine that was to judge it.
class GateEnvironment(GateUndecided):
    """the environment in which kernels are compiled could not be made"""


class WeightsDamaged(PipelineError, code=60):
    """files of a weights set are missing, short or changed, or others lie between them"""

    hint = "`sm120 weights verify DIR --repair` downloads only what is damaged."


class DoesNotFit(PipelineError, code=61):
    """a model does not fit the memory it was asked to fit"""

    hint = "More GPUs or a smaller quant help; fewer tokens only where the KV cache is too large."


class KeyUnusable(PipelineError, code=70):
    """a key is missing, cannot be read or cannot sign"""


class KeyInvalid(KeyUnusable):
    """a key cannot be read, is of another kind or can be read by others"""

    hint = "`sm120 evidence new-key NAME` makes a new key pair."


class KeyExists(KeyUnusable):
    """a key of that name is there already; it is never overwritten"""

    hint = "Take another name: the old key is needed for what it signed."


class SigningFailed(KeyUnusable):
    """there is no key to sign with, or the signing agent gave no valid signature"""

    hint = "`sm120 evidence new-key NAME` makes a key; --key or SM120_SIGNING_KEY names another."


# Each verdict of `verify` has a code of its own, for scripts that deploy what they verified.
class EvidenceInvalid(PipelineError, code=71):
    """evidence contradicts the artifact, its key or itself"""


class EvidenceBroken(EvidenceInvalid):
    """verify: evidence contradicts the artifact, its key or itself"""

    hint = "Do not use it before you know why; get it again from where it was made."


class RecordInvalid(EvidenceInvalid):
    """a statement, envelope or bundle is malformed"""

    hint = "Nothing in it was believed. Get the evidence again from where it was made."


class BundleDamaged(EvidenceInvalid):
    """a file of a bundle is changed, missing, not listed or not a plain file"""

    hint = "Nothing was used. Copy the bundle again from where it was made."


class LayerRefused(EvidenceInvalid):
    """a compiled layer in a registry has no trusted signature, or is of another tree"""

    hint = "The store does not keep it. Ask who published it, or compile: leave --layers-from out."


class ModelSignatureInvalid(EvidenceInvalid):
    """the signature of a weights set is missing, wrong, by another key or over other bytes"""

    hint = "Do not use the set. Fetch it again, or ask its signer for the right key."


class EvidenceUnsigned(PipelineError, code=72):
    """verify: all of the evidence holds, but nobody signed it"""

    hint = "`sm120 evidence new-key NAME` makes a key that signs what was built here."


class EvidenceIncomplete(PipelineError, code=73):
    """verify: nothing is wrong, but not everything could be checked"""

    hint = "The tree above shows what is missing; unknown never counts as valid."


class EvidenceStale(PipelineError, code=74):
    """verify: the evidence holds, but something it describes has changed since"""

    hint = "Build it again, or go back to the state that was recorded."


class DatabaseOld(EvidenceStale):
    """audit: the advisories are older than was asked for"""

    hint = "Fetch the database again. `--max-age DAYS` takes an older one."


# Not EvidenceBroken: the image that was signed is still good, only its name is not.
class TagMoved(PipelineError, code=75):
    """verify: a tag names another image than the one that was signed under it"""

    hint = "Use the signed digest that is named above, and find out who moved the tag."


class RefusedByPolicy(PipelineError, code=76):
    """the evidence is not what a policy or the rules for publishing demand"""


class PolicyRefused(RefusedByPolicy):
    """verify: the evidence does not satisfy the policy file"""


class KnownVulnerable(RefusedByPolicy):
    """audit: a package is known to be vulnerable, and nobody accepted that"""

    hint = "Take a fixed version, or accept it with reason and end under `advisories` in the spec."


# Nothing was sent: gates are read before the registry is asked.
class PublishRefused(RefusedByPolicy):
    """an image was not published: its gates did not pass, or were not run on it"""

    hint = "`sm120 build IMAGE --gate` judges it; `--force-ungated REASON` publishes it anyway."


# Not EvidenceBroken: nothing need be forged, and one number tells where to look.
class NumberChanged(PipelineError, code=77):
    """verify: a number of a benchmark or report is not what was signed or follows from it"""

    hint = "The tree above names the field and what it was; get the run again from its maker."


class HostNotFit(PipelineError, code=80):
    """a host is not set up as it should be, or no longer is"""


class HostUnfit(HostNotFit):
    """a host is set up in a way that breaks or slows its GPUs"""

    hint = "Each failed rule above names its fix."


# Of roles, so that provisioning again may fix it; HostUnfit is of hardware and firmware, too.
class PromiseBroken(HostNotFit):
    """a host does not have what its roles promise"""

    hint = "Each broken promise above names its fix; most are repaired by `nox -s provision`."


class HostDrifted(HostNotFit):
    """a host is no longer what was recorded"""

    hint = "Run the playbook again, or record the new facts if the change was meant."


class HostOutlier(HostNotFit):
    """a host differs from the others of its kind"""

    hint = "Look at the named card, slot or cable first."


class IssueFound(HostNotFit):
    """a known issue was recognised in a log or in a host's facts"""

    hint = "Each finding above names its cause and its fix."


# As 51 for gates: a host that could not be examined is neither good nor bad.
class HostUndecided(PipelineError, code=81):
    """a host could not be judged"""


class HostUnknown(HostUndecided):
    """a host could not be judged: nothing failed, but not everything is known"""

    hint = "Each unknown row above gives its reason; unknown never counts as passed."


class ProbeUnstarted(HostUndecided):
    """the function tests could not be started or gave no result"""

    hint = "Name a Python that has torch with --python, or run them inside an engine image."


# Not 81: a host that is down needs power or a network, not another look.
class HostUnreached(PipelineError, code=82):
    """a host could not be reached, so nothing is known about it"""

    hint = "Check its power, network, SSH key and sudo; the other hosts were checked."


class HostTestFailed(PipelineError, code=83):
    """a function test of a host's GPUs failed"""


class ProbeFailed(HostTestFailed):
    """a function test failed: wrong data, a hang, a dead process or too slow"""

    hint = "The row names it; `sm120 doctor` names known causes and fixes."


class NothingTuned(HostTestFailed):
    """no NCCL setting finished the sweep"""

    hint = "The table names the error of each; check the host first: `sm120 host check`."


class ProvisioningFailed(PipelineError, code=84):
    """provisioning stopped before all hosts were done"""


class ProvisionFailed(ProvisioningFailed):
    """the playbook ended with failed or unreached hosts"""

    hint = "Ansible's messages above name the host and the cause; the play can be run again."


class FleetUnready(ProvisioningFailed):
    """an inventory or playbook cannot be run, so no host was checked"""

    hint = "Read Ansible's message above; `ansible-inventory -i INVENTORY --list` shows its view."


class ServeFailed(PipelineError, code=90):
    """an engine was not started, or does not serve what was asked for"""

    issues: tuple[str, ...] = ()  # known ones that were recognised in its log


class StartFailed(ServeFailed):
    """an engine ended, or did not answer in time; its container was removed"""

    hint = "The last lines of its log are above."


class ContainerRefused(StartFailed):
    """Docker or Podman refused to make or to start a container"""

    hint = "`sm120 render RECIPE --as docker` (or podman) prints the command, to try it by hand."


class BackendDiffers(ServeFailed):
    """the engine's log shows another backend than the recipe expects"""

    hint = "The container was removed. The recipe's `expect` says why each line matters."


class ImageDiffers(ServeFailed):
    """a container is not of the image that was built, so it is not taken for it"""

    hint = "Stop it and serve the recipe again; find out who started it."


class RolledBack(ServeFailed):
    """a deployed version failed on a host, which went back to the one that passed before"""

    hint = "The hosts serve what they served before. Correct the recipe or the image, then deploy."


class AlreadyServed(ServeFailed):
    """a container of that recipe is there already"""

    hint = "`sm120 recipe stop RECIPE` ends it; `sm120 recipe status` shows what it is."


# Nothing was started; a script may free the machine and try again.
class PreflightFailed(PipelineError, code=91):
    """this machine is not ready for a recipe, or that could not be found out"""

    hint = "Each row above names its fix; `--skip-preflight NAME` starts without that check."


# 90 and 91 are of serving a recipe; this is of what an image or a running server shows.
class SmokeNotPassed(PipelineError, code=92):
    """an image or a served model did not prove itself"""


class SmokeFailed(SmokeNotPassed):
    """a rung of the smoke ladder failed: the server gives wrong or broken answers"""

    hint = "Use it no further than its last good rung; --output DIR keeps every request and answer."


class ServerGone(SmokeNotPassed):
    """nobody answers at the address that was to be tested"""

    hint = "Start the server first, and name it as http://HOST:PORT."


class QualityFailed(SmokeNotPassed):
    """a served model counts, calls tools or computes otherwise than it must"""

    hint = "The rows above name the part; --output DIR keeps every request and answer."


class QualityUnknown(SmokeNotPassed):
    """nothing of a served model's quality failed, and something of it could not be judged"""

    hint = "Each unknown part above gives its reason; unknown never counts as passed."


class StartFails(SmokeNotPassed):
    """an image does not start: something that its engine needs is missing or unusable"""

    hint = "The test names it; `sm120 image explain IMAGE PATH` shows where a file comes from."


class StartUnknown(SmokeNotPassed):
    """whether an image starts could not be found out: nothing failed"""

    hint = "Each unknown test above gives its reason; unknown never counts as passed."


# Not 92: the answers may be right, but there is no number to believe.
class BenchNotMeasured(PipelineError, code=93):
    """a benchmark has no numbers that count"""


class BenchVoid(BenchNotMeasured):
    """requests of a benchmark failed, stalled or looped, so that cells of it are void"""

    hint = "The result has every request and why it failed; the same command tries again."


class BenchUnanswered(BenchNotMeasured):
    """nobody answers at the address that was to be measured, or not as an engine does"""

    hint = "Start the server first, and name it as http://HOST:PORT."


# 94 and 95 as 50 and 51: CI stops at the first, and may measure again after the second.
class BenchWorse(PipelineError, code=94):
    """a benchmark is worse than its baseline by more than is allowed"""

    hint = "The rows above show which number of which cell; `--allow` sets what is allowed."


class BenchUndecided(PipelineError, code=95):
    """two benchmarks cannot be told apart well enough to judge, or not be compared at all"""

    hint = "Measure both with more repeats of the same workload; unknown never counts as passed."


class PlanFailed(PipelineError, code=96):
    """stages of a plan failed; the others ran"""

    hint = "The table names each with its error; `sm120 run` again runs only what is not done."


# 128 + SIGINT, as shells report it: gnu.org/software/bash/manual/html_node/Exit-Status.html
class Interrupted(PipelineError, code=130):
    """stopped by Ctrl-C or a signal"""

    hint = "No file is left half-written; run it again to continue."
