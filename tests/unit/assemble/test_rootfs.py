from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.artifacts.oci.record import Kind
from pipeline.core.errors import CorruptArchive, HostileArchive, PipelineError, SpecInvalid
from pipeline.images.assemble.layer import Entry, Slice
from pipeline.images.assemble.rootfs import assemble_overlay, assemble_rootfs
from pipeline.images.lock.debian import read_stanzas
from pipeline.images.spec.image import Account
from tests.testbed.deb_file import Item, folder, hard_link, symlink, write_deb

Tree = dict[str, Entry]
APP = Account(name="app", uid=1000, gid=1001, home="/home/app")


def assembled(tmp_path: Path, *debs: Path, users: Sequence[Account] = ()) -> Tree:
    entries = assemble_rootfs(debs, tmp_path, users=users, architecture="amd64")
    return {entry.path: entry for entry in entries}


def content(entry: Entry) -> bytes:
    if isinstance(entry.content, Slice):
        whole = Path(entry.content.path).read_bytes()
        return whole[entry.content.offset :][: entry.content.size_bytes]
    assert isinstance(entry.content, bytes)
    return entry.content


def deb(tmp_path: Path, name: str, *items: Item, extra: str = "") -> Path:
    return write_deb(tmp_path, name, items, extra=extra)


def test_paths_are_sorted_and_every_parent_is_there(tmp_path: Path) -> None:
    tree = assembled(tmp_path, deb(tmp_path, "a", Item("./usr/x/y/z", b"1")))
    assert list(tree) == sorted(tree)
    assert all(path.rpartition("/")[0] in ("", *tree) for path in tree)
    assert tree["usr/x/y"].kind is Kind.DIR


def test_files_move_below_usr_and_links_stand_in_their_old_place(tmp_path: Path) -> None:
    one = deb(
        tmp_path, "a", folder("./bin/"), Item("./bin/tool", b"1", mode=0o755), Item("./lib/l", b"2")
    )
    two = deb(tmp_path, "b", symlink("./lib64/ld.so", "/lib/ld.so"), Item("./usr/lib/m", b"3"))
    tree = assembled(tmp_path, one, two)
    assert {"usr/bin/tool", "usr/lib/l", "usr/lib/m", "usr/lib64/ld.so"} <= tree.keys()
    tops = {top: tree[top].target for top in ("bin", "sbin", "lib", "lib64")}
    assert tops == {top: f"usr/{top}" for top in tops}
    assert "libx32" not in tree
    assert not any(path.startswith(("bin/", "lib/", "lib64/")) for path in tree)


@pytest.mark.parametrize(
    "item",
    [
        Item("./var/lib/dpkg/status", b"Package: other\n"),
        Item("./var/lib/dpkg/status.d/other", b"Package: other\n"),
        Item("./var/lib/dpkg/info/other.list", b"/.\n"),
        symlink("./var/lib/dpkg/info", "/tmp"),
        symlink("./var/lib/dpkg", "../other"),
    ],
)
@pytest.mark.parametrize("assemble", [assemble_rootfs, assemble_overlay])
def test_no_package_tells_of_others_in_dpkgs_database(
    tmp_path: Path, item: Item, assemble: Callable[..., object]
) -> None:
    given = {"users": ()} if assemble is assemble_rootfs else {}
    with pytest.raises(HostileArchive, match="would change dpkg's database"):
        assemble([deb(tmp_path, "a", item)], tmp_path, architecture="amd64", **given)


def test_dpkg_ships_folders_of_its_database(tmp_path: Path) -> None:
    shipped = deb(tmp_path, "dpkg", folder("./var/lib/dpkg/"), folder("./var/lib/dpkg/parts/"))
    tree = assembled(tmp_path, shipped)
    assert tree["var/lib/dpkg/parts"].kind is Kind.DIR


def test_a_package_may_ship_the_merged_links_itself(tmp_path: Path) -> None:
    shipped = deb(tmp_path, "a", symlink("./bin", "usr/bin"), folder("./lib/"))
    tree = assembled(tmp_path, shipped, deb(tmp_path, "b", Item("./bin/tool", b"1")))
    assert (tree["bin"].target, tree["usr/bin"].kind) == ("usr/bin", Kind.DIR)
    assert "usr/bin/tool" in tree


def test_a_system_folder_that_a_package_ships_as_a_link_stays_one(tmp_path: Path) -> None:
    tree = assembled(tmp_path, deb(tmp_path, "a", symlink("./opt", "usr/local")))
    assert tree["opt"].kind is Kind.SYMLINK


def test_owners_modes_and_set_user_id_are_levelled(tmp_path: Path) -> None:
    items = (
        Item("./usr/bin/su", b"1", mode=0o4755, uid=5),
        Item("./etc/secret", b"2", mode=0o640),
        folder("./var/mail/", mode=0o2775),
    )
    tree = assembled(tmp_path, deb(tmp_path, "a", *items))
    assert [oct(tree[i.name.strip("./")].mode) for i in items] == ["0o755", "0o644", "0o755"]
    assert {(e.uid, e.gid) for e in tree.values()} == {(0, 0)}


def test_what_nobody_reads_in_a_container_is_left_out_and_licences_stay(tmp_path: Path) -> None:
    kept = [
        Item("./usr/share/doc/a/copyright", b"1"),
        symlink("./usr/share/doc/a-dev", "a"),
        Item("./usr/share/common-licenses/MIT", b"2"),
        Item("./usr/share/manifest", b"3"),
    ]
    dropped = [
        Item("./usr/share/doc/a/changelog.gz", b"1"),
        Item("./usr/share/doc/a/examples/copyright/x", b"1"),
        Item("./usr/share/man/man1/a.1.gz", b"1"),
        Item("./usr/share/locale/de/a.mo", b"1"),
        Item("./usr/share/lintian/overrides/a", b"1"),
    ]
    tree = assembled(tmp_path, deb(tmp_path, "a", *kept, *dropped))
    assert all(item.name.removeprefix("./") in tree for item in kept)
    assert not any(item.name.removeprefix("./") in tree for item in dropped)
    assert "usr/share/man" not in tree


def test_the_first_path_of_a_hard_link_group_is_the_file(tmp_path: Path) -> None:
    items = (
        Item("./usr/share/man/m", b"page"),
        hard_link("./usr/lib/z", "./usr/share/man/m"),
        hard_link("./bin/b", "./usr/share/man/m"),
        Item("./usr/e1"),
        Item("./usr/e2"),
    )
    tree = assembled(tmp_path, deb(tmp_path, "a", *items))
    assert (tree["usr/bin/b"].kind, content(tree["usr/bin/b"])) == (Kind.FILE, b"page")
    assert (tree["usr/lib/z"].kind, tree["usr/lib/z"].target) == (Kind.HARDLINK, "usr/bin/b")
    assert tree["usr/e1"].kind is tree["usr/e2"].kind is Kind.FILE


def test_packages_may_share_folders_and_equal_files(tmp_path: Path) -> None:
    shared = (folder("./usr/"), Item("./usr/same", b"1"), symlink("./usr/link", "same"))
    tree = assembled(tmp_path, deb(tmp_path, "a", *shared), deb(tmp_path, "b", *shared))
    assert content(tree["usr/same"]) == b"1"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (Item("./usr/f", b"1"), Item("./usr/f", b"2")),
        (Item("./usr/f", b"1"), Item("./usr/f", b"1", mode=0o755)),
        (Item("./usr/f", b"1"), folder("./usr/f/")),
        (Item("./usr/f", b"1"), symlink("./usr/f", "g")),
        (symlink("./usr/f", "g"), symlink("./usr/f", "h")),
        (Item("./bin/f", b"1"), Item("./usr/bin/f", b"2")),
        (symlink("./usr/f", "g"), Item("./usr/f/below", b"1")),
        (Item("./usr/f", b"1"), Item("./usr/f/deep/below", b"1")),
    ],
)
def test_packages_that_disagree_about_a_path_are_refused(
    tmp_path: Path, one: Item, two: Item
) -> None:
    with pytest.raises(CorruptArchive, match=r"usr/.*f"):
        assembled(tmp_path, deb(tmp_path, "a", one), deb(tmp_path, "b", two))


def test_a_package_for_another_machine_is_refused(tmp_path: Path) -> None:
    other = write_deb(tmp_path, "a", [], architecture="arm64")
    with pytest.raises(CorruptArchive, match="is for arm64, not amd64"):
        assembled(tmp_path, other)


def test_a_package_given_twice_is_refused(tmp_path: Path) -> None:
    again = deb(tmp_path, "a").rename(tmp_path / "again.deb")
    with pytest.raises(CorruptArchive, match="package a is given twice"):
        assembled(tmp_path, deb(tmp_path, "a"), again)


def test_two_packages_of_one_file_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    with pytest.raises(CorruptArchive, match=r"a_1\.0_amd64\.deb is given twice"):
        assembled(tmp_path, deb(tmp_path, "a"), deb(tmp_path / "more", "a"))


def test_several_users_are_all_there(tmp_path: Path) -> None:
    second = Account(name="other", uid=1001, gid=1002, home="/home/other")
    tree = assembled(tmp_path, deb(tmp_path, "a"), users=[APP, second])
    assert content(tree["etc/passwd"]).splitlines()[-1].startswith(b"other:*:1001:1002:")
    assert (tree["home/app"].uid, tree["home/other"].uid) == (1000, 1001)


def test_users_that_share_a_number_are_refused(tmp_path: Path) -> None:
    second = Account(name="other", uid=1000, gid=1002, home="/home/other")
    with pytest.raises(SpecInvalid, match="other"):
        assembled(tmp_path, deb(tmp_path, "a"), users=[APP, second])


def test_accounts_come_from_base_passwd_with_the_user_added(tmp_path: Path) -> None:
    base = deb(
        tmp_path,
        "base-passwd",
        Item("./usr/share/base-passwd/passwd.master", b"root:*:0:0:root:/root:/bin/bash\n"),
        Item("./usr/share/base-passwd/group.master", b"root:*:0:\nstaff:*:50:\n"),
    )
    tree = assembled(tmp_path, base, users=[APP])
    assert content(tree["etc/passwd"]).decode().splitlines() == [
        "root:*:0:0:root:/root:/bin/bash",
        "app:*:1000:1001::/home/app:/usr/sbin/nologin",
    ]
    assert content(tree["etc/group"]).endswith(b"staff:*:50:\napp:*:1001:\n")
    home = tree["home/app"]
    assert (home.kind, home.uid, home.gid) == (Kind.DIR, 1000, 1001)


def test_an_image_without_base_passwd_still_knows_root(tmp_path: Path) -> None:
    tree = assembled(tmp_path, deb(tmp_path, "a"))
    assert content(tree["etc/passwd"]).startswith(b"root:")
    assert b"hosts:" in content(tree["etc/nsswitch.conf"])


@pytest.mark.parametrize(
    "user",
    [
        Account(name="root", uid=1000, gid=1000, home="/home/x"),
        Account(name="games", uid=5, gid=1000, home="/home/x"),
        Account(name="games", uid=1000, gid=50, home="/home/x"),
        Account(name="games", uid=1000, gid=1000, home="/tmp"),
    ],
)
def test_a_user_that_debian_already_has_is_refused(tmp_path: Path, user: Account) -> None:
    base = deb(
        tmp_path,
        "base-passwd",
        Item("./usr/share/base-passwd/passwd.master", b"root:*:0:0::/root:/bin/sh\nx:*:5:5::/:/\n"),
        Item("./usr/share/base-passwd/group.master", b"staff:*:50:\n"),
    )
    with pytest.raises(SpecInvalid):
        assembled(tmp_path, base, users=[user])


@pytest.mark.parametrize(
    "change",
    [{"name": "a:b"}, {"name": "A"}, {"uid": 0}, {"gid": 0}, {"home": "/a/../b"}, {"shell": "sh"}],
)
def test_a_user_that_would_break_passwd_cannot_be_written_down(change: dict[str, object]) -> None:
    fields = {"name": "a", "uid": 1, "gid": 1, "home": "/home/a"}
    assert Account.model_validate(fields)
    with pytest.raises(ValueError, match="validation error"):
        Account.model_validate(fields | change)


def test_certificates_become_one_bundle_in_order_of_name(tmp_path: Path) -> None:
    place = "./usr/share/ca-certificates/mozilla"
    items = (Item(f"{place}/B.crt", b"two"), Item(f"{place}/A.crt", b"one\n"), Item("./usr/c.crt"))
    tree = assembled(tmp_path, deb(tmp_path, "ca-certificates", *items))
    assert content(tree["etc/ssl/certs/ca-certificates.crt"]) == b"one\ntwo\n"
    assert tree["usr/lib/ssl/cert.pem"].target == "/etc/ssl/certs/ca-certificates.crt"


def test_links_are_made_where_their_target_exists(tmp_path: Path) -> None:
    names = ("./bin/dash", "./usr/bin/gcc", "./usr/bin/g++", "./usr/bin/python3.11")
    items = [Item(name, name.encode(), mode=0o755) for name in names]
    tree = assembled(tmp_path, deb(tmp_path, "a", *items))
    made = {path: tree[path].target for path in tree if path in _made_links()}
    assert made == {
        "usr/bin/sh": "dash",
        "usr/bin/cc": "gcc",
        "usr/bin/c++": "g++",
        "usr/bin/python3": "python3.11",
    }


def _made_links() -> set[str]:
    return {f"usr/bin/{name}" for name in ("sh", "cc", "c++", "python3", "awk", "which")} | {
        "usr/lib/ssl/cert.pem",
        "etc/localtime",
    }


def test_a_link_that_a_package_ships_is_left_alone(tmp_path: Path) -> None:
    shipped = (Item("./bin/dash", b"1"), Item("./bin/bash", b"2"), symlink("./bin/sh", "bash"))
    assert assembled(tmp_path, deb(tmp_path, "a", *shipped))["usr/bin/sh"].target == "bash"


def test_folders_that_a_container_needs_are_there_with_their_modes(tmp_path: Path) -> None:
    tree = assembled(tmp_path, deb(tmp_path, "a", folder("./tmp/", mode=0o755)))
    modes = {path: tree[path].mode for path in ("tmp", "var/tmp", "root", "run", "proc", "dev")}
    assert modes == {
        "tmp": 0o1777,
        "var/tmp": 0o1777,
        "root": 0o700,
        "run": 0o755,
        "proc": 0o755,
        "dev": 0o755,
    }
    assert "etc/hostname" not in tree
    assert tree["var/run"].target == "/run"


def test_dpkgs_database_lists_every_package_as_installed(tmp_path: Path) -> None:
    one = deb(tmp_path, "b", Item("./bin/tool", b"1"), extra="Multi-Arch: same\n")
    tree = assembled(tmp_path, one, deb(tmp_path, "a"))
    stanzas = list(read_stanzas(content(tree["var/lib/dpkg/status"]).decode()))
    assert [(s["Package"], s["Status"], s["Version"]) for s in stanzas] == [
        ("a", "install ok installed", "1.0"),
        ("b", "install ok installed", "1.0"),
    ]
    assert content(tree["var/lib/dpkg/info/b:amd64.list"]) == b"/.\n/usr/bin/tool\n"
    assert "var/lib/dpkg/info/a.list" in tree


def test_the_result_does_not_depend_on_order_or_place(tmp_path: Path) -> None:
    def snapshot(place: str, reverse: bool) -> list[object]:
        folder_ = tmp_path / place
        folder_.mkdir()
        debs = [
            deb(folder_, "a", Item("./bin/x", b"1"), hard_link("./bin/w", "./bin/x")),
            deb(folder_, "b", Item("./usr/y", b"2")),
        ]
        tree = assembled(folder_, *(debs[::-1] if reverse else debs), users=[APP])
        return [
            (e.path, e.kind, e.mode, e.target, e.uid, content(e) if e.content is not None else b"")
            for e in tree.values()
        ]

    assert snapshot("one", False) == snapshot("two", True)


def test_a_damaged_package_among_good_ones_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.deb"
    bad.write_bytes(b"!<arch>\n")
    with pytest.raises(PipelineError, match=r"bad\.deb"):
        assembled(tmp_path, deb(tmp_path, "a"), bad)


@pytest.mark.parametrize("name", ["passwd", "group"])
@pytest.mark.parametrize(
    "table", [b"x", b"x\n", b"\xff\xfe", b"root:x:0:0\nno newline:x:1:1", b"\n"]
)
def test_a_damaged_list_of_users_is_told_by_whoever_adds_one(
    tmp_path: Path, name: str, table: bytes
) -> None:
    shipped = deb(tmp_path, "a", Item(f"./etc/{name}", table))
    with pytest.raises(CorruptArchive, match="in /etc is damaged"):
        assembled(tmp_path, shipped, users=[APP])


def test_a_name_that_is_no_UTF8_in_a_list_of_users_is_none_of_ours(tmp_path: Path) -> None:
    table = b"root:x:0:0::/root:/bin/sh\n\xff\xfe:x:7:7::/:/bin/sh\n"
    tree = assembled(tmp_path, deb(tmp_path, "a", Item("./etc/passwd", table)), users=[APP])
    assert content(tree["etc/passwd"]).startswith(table + b"app:*:1000:1001:")
