"""Every way this pipeline can end badly, with its exit code and what to try.

The README prints this table from the code, so a code never changes meaning silently.
"""

from __future__ import annotations


class PipelineError(Exception):
    """What happened (the message), what to try (the hint), how the process ends (the code)."""

    exit_code = 1
    meaning = "something failed that has no code of its own"
    hint = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


class SpecInvalid(PipelineError):
    exit_code = 10
    meaning = "an image.yaml or series.yaml is not valid"
    hint = "Fix the named field; `sm120 schema` prints what the file may hold."


class LockMissing(PipelineError):
    exit_code = 11
    meaning = "an image has no lock for this platform"
    hint = "Make it with `sm120 lock IMAGE`."


class LockStale(PipelineError):
    exit_code = 12
    meaning = "a lock answers an older spec"
    hint = "Look at what would move with `sm120 lock --diff`, then `sm120 lock IMAGE`."


class LockEdited(PipelineError):
    exit_code = 13
    meaning = "a lock was changed by hand or is damaged"
    hint = "Take the committed file back (`git checkout lockfiles`), or `sm120 lock` anew."


class LocksDisagree(LockEdited):
    meaning = "two locks of one commit name different contents"


class GoldenMismatch(PipelineError):
    exit_code = 14
    meaning = "a build gave another digest than the committed one"
    hint = "If you changed the spec or a patch on purpose: `sm120 build IMAGE --accept`."


class ResolveFailed(PipelineError):
    exit_code = 15
    meaning = "no set of wheels or .debs answers the spec"
    hint = "Read the resolver's words above; loosen or correct the requirement."


class UnknownPackage(PipelineError):
    exit_code = 16
    meaning = "a Debian package is in no index that was read"


class SignatureInvalid(PipelineError):
    exit_code = 17
    meaning = "a Release file's signature is missing, wrong or by an unknown key"
    hint = "Nothing was used. Another mirror may help; a private one needs its keyring named."


class IndexBroken(PipelineError):
    exit_code = 18
    meaning = "an index or Release file is damaged, expired or contradicts itself"
    hint = "Nothing was used. Try again later or another mirror."


class MirrorUnknown(PipelineError):
    exit_code = 19
    meaning = "this machine does not say where Debian's packages are"
    hint = "Set SM120_DEBIAN_MIRROR to the address of a Debian mirror."


class SourceUnreachable(PipelineError):
    exit_code = 20
    meaning = "no configured source could deliver a locked file"
    hint = "See `sm120 sources`; check proxy and network, then go on: finished files are kept."


class DigestMismatch(PipelineError):
    exit_code = 21
    meaning = "a source delivered other bytes than the lock names"
    hint = "Nothing was kept. Upstream changed under a fixed name: compare, then `sm120 lock`."


class OfflineMiss(PipelineError):
    exit_code = 22
    meaning = "--offline, and a needed file is not in the store"
    hint = "Run once without --offline, or name a folder that has it with --mirror."


class CorruptArchive(PipelineError):
    exit_code = 30
    meaning = "a wheel, .deb or base layer is damaged or contradicts itself"
    hint = "Nothing was kept. The published file itself is bad: pick another version."


class HostileArchive(PipelineError):
    exit_code = 31
    meaning = "a wheel, .deb or base layer tries to write outside its place"
    hint = "Nothing was kept. Do not use this package version; tell its authors."


class PathConflict(PipelineError):
    exit_code = 32
    meaning = "two wheels write one path with different bytes"
    hint = "Name the one that must win under `python: prefer:` in image.yaml."


class PatchConflict(PipelineError):
    exit_code = 33
    meaning = "a patch does not fit the file it is for"
    hint = "Redo the patch for this version; no fuzz and no offset is allowed."


class NotReproducible(PipelineError):
    exit_code = 34
    meaning = "a rebuild gave other bytes"
    hint = "The first difference is named above; keep both layouts and report it."


class StoreUnwritable(PipelineError):
    exit_code = 40
    meaning = "the store cannot be written"
    hint = "Point SM120_STORE at a folder you own."


class DiskFull(PipelineError):
    exit_code = 41
    meaning = "not enough disk space"
    hint = "Free some (`sm120 store trim`) or move SM120_STORE; what was finished is kept."


class StoreDamaged(PipelineError):
    exit_code = 42
    meaning = "a file in the store is not what its name says"
    hint = "`sm120 store check --repair` removes damaged files; the next build makes them again."


class FolderInTheWay(StoreDamaged):
    hint = "Look what it is and move it away; the next build makes the file."

    def __init__(self, path: object) -> None:
        super().__init__(f"{path}: is a folder, where the store has a file")


class UnknownImage(PipelineError):
    exit_code = 43
    meaning = "no such image, or it is not built yet"
    hint = "`sm120 images` lists them; `sm120 build IMAGE` builds one."


class NotAStore(PipelineError):
    exit_code = 44
    meaning = "the folder named as the store holds other things"
    hint = "Nothing in it was touched. Name a new or empty folder with --store or SM120_STORE."


class MissingTool(PipelineError):
    exit_code = 50
    meaning = "a program this step needs is not installed"


class DockerUnavailable(PipelineError):
    exit_code = 51
    meaning = "no Docker daemon answers"
    hint = (
        "Start Docker, or set DOCKER_HOST. Building needs no Docker, only loading and running do."
    )


class GateInvalid(PipelineError):
    exit_code = 60
    meaning = "a gate's case file is missing or not valid"
    hint = "Fix the named field; README shows what a case holds."


class GateFailed(PipelineError):
    exit_code = 61
    meaning = "a kernel of an image needs more than the target card has"
    hint = "Patch its block sizes (`sm120 gate tune IMAGE CASE`), or list it as accepted with why."


class GateUnknown(PipelineError):
    exit_code = 62
    meaning = "a gate could not be judged: nothing failed, but not everything was seen"
    hint = "Each unknown case says why above; unknown is never taken for passed."


class GateEnvironment(PipelineError):
    exit_code = 63
    meaning = "the environment in which kernels are compiled could not be made"


class PatchUnproved(PipelineError):
    exit_code = 64
    meaning = "a patch is not needed, does nothing or does not do enough"
    hint = "Drop a superseded or upstreamed patch; redo an inert one."


class NoKernelImage(PipelineError):
    exit_code = 65
    meaning = "an object of an image holds no code that the target card can run"
    hint = "Take a build made for the card, or accept it with a reason in gates/arch.yaml."


class GateWrong(PipelineError):
    exit_code = 66
    meaning = "a kernel of an image computes wrong numbers"
    hint = (
        "Compare the patched kernel with the published one; `--unpatched` says whose fault it is."
    )


class WeightsUnknown(PipelineError):
    exit_code = 70
    meaning = "no such weights set, or the folder holds none that is known"
    hint = "`sm120 weights list` shows the sets this checkout knows."


class WeightsDamaged(PipelineError):
    exit_code = 71
    meaning = "files of a weights set are missing, short or changed"
    hint = "`sm120 weights verify DIR --repair` fetches only what is wrong."


class HubRefused(PipelineError):
    exit_code = 72
    meaning = "the Hub does not let this user have a repository, a revision or a file"
    hint = "Accept the licence on the model's page, and set HF_TOKEN or run `hf auth login`."


class HubBroken(PipelineError):
    exit_code = 73
    meaning = "the Hub's answer is damaged or contradicts itself"
    hint = "Nothing was kept. Try again later, or another HF_ENDPOINT."


class RevisionMoved(PipelineError):
    exit_code = 74
    meaning = "a repository changed while it was read, or no longer has the locked commit"
    hint = "Lock again with `sm120 weights lock NAME --diff`, and look at what moved."


class DoesNotFit(PipelineError):
    exit_code = 75
    meaning = "a model does not fit the memory it was asked to fit"
    hint = "The table above says what is short; fewer tokens, a smaller quant or more cards help."


class ModelUnreadable(PipelineError):
    exit_code = 76
    meaning = "a config.json or GGUF header is damaged or of a kind this tool does not know"


class AddressUnusable(PipelineError):
    exit_code = 77
    meaning = "a server cannot listen where it was told to, or its token or certificate is no good"
    hint = "Choose another --port or --host; see who has it with `ss -ltnp`."


class ModelSignatureInvalid(PipelineError):
    exit_code = 78
    meaning = "a weights set's signature is missing, wrong, by another key or over other bytes"
    hint = "Do not use the set. Fetch it again, or ask its signer for the right key."


class TagMoved(PipelineError):
    exit_code = 79
    meaning = "verify: a tag names another image than the one that was signed under it"
    hint = "Use the signed digest that is named above, and find out who moved the tag."


class RecordInvalid(PipelineError):
    exit_code = 80
    meaning = "a statement, envelope or bundle is malformed"
    hint = "Nothing in it was believed. Get the evidence again from where it was made."


class KeyInvalid(PipelineError):
    exit_code = 81
    meaning = "a key cannot be read, is of another kind or lies open to others"
    hint = "`sm120 keys new NAME` makes a good one, its public half beside it."


class KeyExists(PipelineError):
    exit_code = 82
    meaning = "a key of that name is there already; it is never overwritten"
    hint = "Take another name: the old key is needed for what it signed."


class SigningFailed(PipelineError):
    exit_code = 83
    meaning = "there is nothing to sign with, or what signs gave no good signature"
    hint = "`sm120 keys new NAME` makes a key; --key, SM120_SIGNING_KEY or _AGENT name another."


class TrustInvalid(PipelineError):
    exit_code = 84
    meaning = "a trust or policy file is missing or not valid"
    hint = "`sm120 keys show KEY` prints an entry; --trust names the file."


class EvidenceStale(PipelineError):
    exit_code = 85
    meaning = "verify: the evidence holds, but something it speaks of has moved since"
    hint = "Build and record again, or look at the state that was recorded."


class EvidenceBroken(PipelineError):
    exit_code = 86
    meaning = "verify: evidence contradicts the artifact, its key or itself"
    hint = "Do not use it before you know why; the tree above says where."


class EvidenceUnsigned(PipelineError):
    exit_code = 87
    meaning = "verify: valid but unsigned: all of the evidence holds, and nobody signed it"
    hint = "`sm120 keys new NAME` makes a key and signs what was built here; others sign theirs."


class EvidenceIncomplete(PipelineError):
    exit_code = 88
    meaning = "verify: nothing contradicts, but not everything could be checked"
    hint = "The tree above says what is missing; unknown is never taken for valid."


class PolicyRefused(PipelineError):
    exit_code = 89
    meaning = "verify: the evidence does not satisfy the policy file"


class ReferenceInvalid(PipelineError):
    exit_code = 90
    meaning = "the name of an image in a registry is not valid, or does not say enough"
    hint = (
        "Write REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@sha256:…, with the registry's name."
    )


class RegistryUnreachable(PipelineError):
    exit_code = 91
    meaning = "a registry does not answer, or only with errors of its own"
    hint = (
        "Check its name, the network, its CA (--ca); run it again: what arrived is not sent twice."
    )


class RegistryRefused(PipelineError):
    exit_code = 92
    meaning = "a registry does not let this user do that"
    hint = "`docker login REGISTRY` keeps a login where this command looks for it."


class RegistryBroken(PipelineError):
    exit_code = 93
    meaning = "a registry's answer is damaged or contradicts itself"
    hint = "Nothing of it was used. Try again; if it stays so, tell the registry's owner."


class NotInRegistry(PipelineError):
    exit_code = 94
    meaning = "a registry holds no such repository, tag or digest"
    hint = "`sm120 registry ls REGISTRY/REPOSITORY` shows its tags."


class PublishRefused(PipelineError):
    exit_code = 95
    meaning = "an image was not published: its gates did not pass, or were not run on it"
    hint = "`sm120 build IMAGE --gate` judges it; `--force-ungated REASON` publishes and says so."


class DeleteDisabled(PipelineError):
    exit_code = 96
    meaning = "a registry does not allow deleting"
    hint = "Its owner can: docker-registry needs `storage: delete: enabled: true`."


class AttachmentInvalid(PipelineError):
    exit_code = 97
    meaning = "what should be attached to an image is missing, too large or of no named type"
    hint = "Write --attach FILE:TYPE, e.g. sbom.json:application/vnd.cyclonedx+json."


class BaseUnplaced(PipelineError):
    exit_code = 98
    meaning = "a foreign base image is needed, and no registry is named that could have it"
    hint = "Name one with --base-registry REGISTRY[/PREFIX], or in SM120_BASE_REGISTRIES."


class BaseUnusable(PipelineError):
    exit_code = 99
    meaning = "a foreign base image is for another platform, of no supported kind or contradictory"
    hint = "Nothing stands on it. Name the digest of another image under `base`."


class FactsUnreadable(PipelineError):
    exit_code = 100
    meaning = "a file of host facts, a capture or a probe's answer is damaged or of another kind"
    hint = "Make it anew with `sm120 host facts --json` or `sm120 host check --json`."


class HostUnfit(PipelineError):
    exit_code = 101
    meaning = "a host is set up in a way that breaks or slows its cards"
    hint = "Each failed rule above names its cure."


class HostUnknown(PipelineError):
    exit_code = 102
    meaning = "a host could not be judged: nothing failed, but not everything was seen"
    hint = "Each unknown row says why above; unknown is never taken for passed."


class ProbeFailed(PipelineError):
    exit_code = 103
    meaning = "a function test failed: wrong data, a hang, a dead process or too slow"
    hint = "The row names it; `sm120 host doctor` tells known causes and cures."


class ProbeUnstarted(PipelineError):
    exit_code = 104
    meaning = "the function tests could not be started or gave no answer"
    hint = "Name a Python that has torch with --python, or run them inside an engine image."


class HostDrifted(PipelineError):
    exit_code = 105
    meaning = "a host is no longer what was recorded"
    hint = "Run the playbook again, or record the new facts if the change was meant."


class HostOutlier(PipelineError):
    exit_code = 106
    meaning = "a host differs from its equals"
    hint = "Look at the named card, slot or cable first."


class IssueFound(PipelineError):
    exit_code = 107
    meaning = "a known issue was recognised in a log or in a host's facts"
    hint = "Each finding above names its cause and its cure."


class NothingTuned(PipelineError):
    exit_code = 108
    meaning = "no NCCL setting finished the sweep"
    hint = "The table names how each ended; check the host first: `sm120 host check`."


class PromiseBroken(PipelineError):
    exit_code = 109
    meaning = "a host does not have what its roles promised"
    hint = "Each broken promise above names its cure; most are repaired by `nox -s provision`."


class HostUnreached(PipelineError):
    exit_code = 110
    meaning = "a host could not be reached, so nothing is known of it"
    hint = "Look at its power, network, SSH key and sudo; the others were checked."


class FleetUnready(PipelineError):
    exit_code = 111
    meaning = "an inventory or playbook cannot be run, so no host was looked at"
    hint = "Read Ansible's words above; `ansible-inventory -i INVENTORY --list` shows what it sees."


class ProvisionFailed(PipelineError):
    exit_code = 112
    meaning = "the playbook ended with failed or unreached hosts"
    hint = "Ansible's words above name host, cause and cure; the play can be run again."


class Interrupted(PipelineError):
    exit_code = 130
    meaning = "stopped by Ctrl-C or a signal"
    hint = "Nothing is half-written; run it again to go on."


def exit_codes() -> list[tuple[int, str, str, str]]:
    """Rows of (code, name, meaning, hint) in order of code, for the README and `sm120 --help`."""
    kinds: list[type[PipelineError]] = [PipelineError, *PipelineError.__subclasses__()]
    return sorted((k.exit_code, k.__name__, k.meaning, k.hint) for k in kinds)
