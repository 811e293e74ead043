"""What a payload folder becomes: shipped, excluded or refused files, a content id, and where it came from."""

import hashlib
import json
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import bundle as bundle_module
from orchestrator import payload_files, provenance
from orchestrator.bundle import (
    Bundle,
    Entry,
    ObjectStore,
    Provenance,
    build_bundle,
    build_script_bundle,
    empty_bundle,
    find_payload,
)
from orchestrator.errors import PayloadRefused, StorageError, UnknownName, UsageError
from orchestrator.payload_files import MAX_FILE_BYTES

REMOTE = "https://me:s3cret@example.invalid/team/project.git"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / 'it\'s a "project"\nhere'
    (folder / "payloads" / "probe").mkdir(parents=True)
    _put(folder / "payloads/probe/__init__.py", "")
    _put(folder / "payloads/probe/run.py", "print('hello')\n")
    return folder


@pytest.fixture
def payload(project: Path) -> Path:
    return project / "payloads" / "probe"


@pytest.fixture
def store(project: Path) -> ObjectStore:
    return ObjectStore(project / ".orch")


def _put(path: Path, content: str | bytes, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def _paths(bundle: Bundle) -> list[str]:
    return [entry.path for entry in bundle.entries]


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit(project: Path) -> str:
    if not (project / ".git").exists():
        _git(project, "init", "--quiet", "--initial-branch=main")
    _git(project, "add", "--all", "payloads")
    _git(project, "commit", "--quiet", "--message=x")
    return _git(project, "rev-parse", "HEAD")


# What is shipped


def test_a_payload_is_shipped_under_its_own_name(payload: Path, store: ObjectStore) -> None:
    bundle = build_bundle(payload, store)
    content = b"print('hello')\n"
    assert _paths(bundle) == ["probe/__init__.py", "probe/run.py"]
    assert bundle.entries[1] == Entry(
        path="probe/run.py", mode=0o644, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    assert bundle.size_bytes == len(content)
    assert bundle.excluded == ()
    with store.open(bundle.entries[1].sha256) as file:
        assert file.read() == content


@pytest.mark.parametrize(
    "name", ["a b", 'q"uote', "apo'strophe", "new\nline", "-dash", "ünï 日本", "*", "back\\slash"]
)
def test_awkward_names_are_shipped_as_they_are(payload: Path, store: ObjectStore, name: str) -> None:
    _put(payload / name / name, "x")
    assert f"probe/{name}/{name}" in _paths(build_bundle(payload, store))


@pytest.mark.parametrize(
    ("mode", "shipped"), [(0o644, 0o644), (0o600, 0o644), (0o755, 0o755), (0o700, 0o755), (0o4755, 0o755)]
)
def test_of_a_mode_only_executable_remains(
    payload: Path, store: ObjectStore, mode: int, shipped: int
) -> None:
    _put(payload / "run.py", "x", mode)
    assert build_bundle(payload, store).entries[1].mode == shipped


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".git", ".hg/x", ".svn/x", "sub/.git/HEAD"),
        *("__pycache__/a.pyc", "a.pyc", "a.pyo", ".orch/x", ".mypy_cache/x", ".pytest_cache/x", ".DS_Store"),
        *(".venv/pyvenv.cfg", "venv/pyvenv.cfg", "my env/pyvenv.cfg"),
        *(
            ".env",
            ".env.local",
            ".ENV",
            "tls.pem",
            "tls.KEY",
            "id_rsa",
            "id_rsa.pub",
            "id_ed25519_work",
            ".netrc",
        ),
        *(".ssh/config", ".aws/credentials"),
    ],
)
def test_what_is_excluded_is_neither_shipped_nor_stored(payload: Path, store: ObjectStore, path: str) -> None:
    before = build_bundle(payload, store)
    secret = b"s3cret"
    _put(payload / "deep" / path, secret)
    after = build_bundle(payload, store)
    assert after.id == before.id
    [excluded] = after.excluded
    assert excluded.startswith("probe/deep/")
    assert not store.path(hashlib.sha256(secret).hexdigest()).exists()


@pytest.mark.parametrize(
    "path", ["venv/x.py", "env/x.py", "key.py", "pem", "environment", ".gitignore", ".orchard"]
)
def test_what_only_resembles_an_excluded_name_is_shipped(
    payload: Path, store: ObjectStore, path: str
) -> None:
    _put(payload / path, "x")
    assert f"probe/{path}" in _paths(build_bundle(payload, store))


def test_a_symlink_to_a_shipped_file_is_shipped_as_a_file(payload: Path, store: ObjectStore) -> None:
    (payload / "sub").mkdir()
    (payload / "sub/link.py").symlink_to("../run.py")
    by_path = {entry.path: entry for entry in build_bundle(payload, store).entries}
    assert by_path["probe/sub/link.py"].sha256 == by_path["probe/run.py"].sha256


def _symlink_to(target: str) -> Callable[[Path], object]:
    return lambda payload: (payload / "bad\x1b").symlink_to(target)


def _socket(payload: Path) -> None:
    here = Path.cwd()
    os.chdir(payload)  # a socket's path is limited to 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("bad\x1b")
    finally:
        os.chdir(here)


def _secret_link(payload: Path) -> None:
    _put(payload / ".env", "s3cret")
    (payload / "bad\x1b").symlink_to(".env")


def _environment_link(payload: Path) -> None:
    _put(payload / ".venv/pyvenv.cfg", "")
    _put(payload / ".venv/bin/tool", "")
    (payload / "bad\x1b").symlink_to(".venv/bin/tool")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_symlink_to("/etc/passwd"), "out of the payload"),
        (_symlink_to("../../outside.txt"), "out of the payload"),
        (_symlink_to("."), "to a folder"),
        (_symlink_to("/etc"), "out of the payload"),
        (_symlink_to("absent"), "leads nowhere"),
        (_symlink_to("bad\x1b"), "leads nowhere"),
        (_secret_link, "excluded"),
        (_environment_link, "excluded"),
        (lambda payload: os.mkfifo(payload / "bad\x1b"), "neither a file nor a folder"),
        (_socket, "neither a file nor a folder"),
    ],
)
def test_what_cannot_be_shipped_honestly_is_refused_by_name(
    project: Path, payload: Path, store: ObjectStore, spoil: Callable[[Path], object], reason: str
) -> None:
    _put(project / "outside.txt", "s3cret")
    spoil(payload)
    with pytest.raises(PayloadRefused, match=reason) as caught:
        build_bundle(payload, store)
    assert r"probe/bad\x1b" in str(caught.value)
    assert str(caught.value).isprintable()
    assert not (store.root / "objects").exists()


def test_a_name_that_is_not_utf_8_is_refused(payload: Path, store: ObjectStore) -> None:
    _put(Path(os.fsdecode(bytes(payload) + b"/\xff.py")), "x")
    with pytest.raises(PayloadRefused, match=r"\\udcff\.py: the name is not UTF-8"):
        build_bundle(payload, store)


def test_a_file_over_the_limit_is_refused_and_one_at_the_limit_is_not(
    payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (payload / "weights.bin").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(PayloadRefused, match=r"probe/weights\.bin: 256 MiB, more than 256 MiB"):
        build_bundle(payload, store)
    assert not store.root.exists()
    monkeypatch.setattr(payload_files, "MAX_FILE_BYTES", 1024)
    os.truncate(payload / "weights.bin", 1024)
    assert build_bundle(payload, store).entries[-1].size_bytes == 1024


def test_a_huge_sparse_file_and_a_large_total_are_refused_before_anything_is_read(
    payload: Path, store: ObjectStore
) -> None:
    with (payload / "data.bin").open("wb") as file:
        file.truncate(2 * 1024**3)
    with pytest.raises(PayloadRefused, match=r"probe/data\.bin: 2048 MiB"):
        build_bundle(payload, store)
    (payload / "data.bin").unlink()
    for number in range(5):
        with (payload / f"{number}.bin").open("wb") as file:
            file.truncate(220 * 1024**2)
    with pytest.raises(PayloadRefused, match=r"1\.07 GiB, more than 1 GiB"):
        build_bundle(payload, store)
    assert not store.root.exists()


def test_a_payload_with_nothing_to_ship_is_refused(project: Path, store: ObjectStore) -> None:
    _put(project / "payloads/empty/.env", "x")
    with pytest.raises(PayloadRefused, match="no file to ship"):
        build_bundle(project / "payloads/empty", store)
    with pytest.raises(PayloadRefused, match="cannot be read"):
        build_bundle(project / "payloads/absent", store)


def test_a_file_that_vanishes_or_turns_into_a_fifo_while_reading_is_refused(
    payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = payload_files.check_sizes

    def then(change: Callable[[], object]) -> None:
        def check_and_change(files: list[payload_files.ShippedFile]) -> None:
            check(files)
            change()

        monkeypatch.setattr(bundle_module, "check_sizes", check_and_change)

    def to_fifo() -> None:
        (payload / "run.py").unlink(missing_ok=True)
        os.mkfifo(payload / "run.py")

    def to_link() -> None:
        (payload / "run.py").unlink()
        (payload / "run.py").symlink_to("/etc/passwd")

    for change, reason in ((to_fifo, "no file any more"), (to_link, "cannot be read")):
        (payload / "run.py").unlink()
        _put(payload / "run.py", "x")
        then(change)
        with pytest.raises(PayloadRefused, match=reason):
            build_bundle(payload, store)


# Ids and the store


def test_the_id_is_the_hash_of_the_manifest(payload: Path, store: ObjectStore) -> None:
    bundle = build_bundle(payload, store)
    raw = (store.root / "bundles" / f"{bundle.id}.json").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == bundle.id
    entries = [[entry.path, entry.mode, entry.size_bytes, entry.sha256] for entry in bundle.entries]
    assert json.loads(raw) == {"version": 1, "entries": entries}


def test_a_manifest_comes_back_as_the_same_content(payload: Path, store: ObjectStore) -> None:
    bundle = build_bundle(payload, store)
    loaded = store.load_manifest(bundle.id)
    assert (loaded.id, loaded.entries, loaded.size_bytes) == (bundle.id, bundle.entries, bundle.size_bytes)
    assert loaded.manifest() == bundle.manifest()


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in {".", ".."} and len(name.encode()) < 200 and not payload_files.is_excluded(name)
)


@settings(max_examples=40)
@given(
    st.dictionaries(NAMES, st.tuples(st.binary(max_size=50), st.booleans()), min_size=1, max_size=8),
    st.randoms(),
)
def test_the_id_depends_on_names_content_and_modes_alone(
    files: dict[str, tuple[bytes, bool]], random: Random
) -> None:
    ids = []
    with tempfile.TemporaryDirectory() as scratch:
        for attempt in range(2):
            payload = Path(scratch) / str(attempt) / "probe"
            names = list(files)
            random.shuffle(names)
            for name in names:
                content, is_executable = files[name]
                path = _put(payload / name, content, 0o711 if is_executable else 0o600)
                moment = random.randrange(10**9)
                os.utime(path, (moment, moment))
            bundle = build_bundle(payload, ObjectStore(Path(scratch) / "store"))
            assert _paths(bundle) == sorted(f"probe/{name}" for name in files)
            ids.append(bundle.id)
    assert ids[0] == ids[1]


def test_any_change_of_name_content_or_mode_changes_the_id(payload: Path, store: ObjectStore) -> None:
    ids = {build_bundle(payload, store).id}
    _put(payload / "run.py", "print('hullo')\n")
    ids.add(build_bundle(payload, store).id)
    (payload / "run.py").chmod(0o755)
    ids.add(build_bundle(payload, store).id)
    (payload / "run.py").rename(payload / "ran.py")
    ids.add(build_bundle(payload, store).id)
    payload.rename(payload.with_name("other"))
    ids.add(build_bundle(payload.with_name("other"), store).id)
    assert len(ids) == 5


def _snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_building_unchanged_content_again_writes_nothing(
    project: Path, payload: Path, store: ObjectStore
) -> None:
    _commit(project)
    _put(payload / "run.py", "changed")
    first = build_bundle(payload, store)
    before = _snapshot(project)
    assert build_bundle(payload, store) == first
    assert _snapshot(project) == before


def test_everything_in_the_store_is_for_this_user_alone(payload: Path, store: ObjectStore) -> None:
    old = os.umask(0)
    try:
        build_bundle(payload, ObjectStore(store.root / "new" / "deeper"))
    finally:
        os.umask(old)
    for path in [store.root, *store.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_object_cut_off_by_a_crash_is_written_again(payload: Path, store: ObjectStore) -> None:
    bundle = build_bundle(payload, store)
    os.truncate(store.path(bundle.entries[1].sha256), 0)
    build_bundle(payload, store)
    with store.open(bundle.entries[1].sha256) as file:
        assert file.read() == b"print('hello')\n"


def test_no_half_written_file_remains_when_the_disk_is_full(
    payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StorageError, match="No space left on device"):
        build_bundle(payload, store)
    assert [path for path in store.root.rglob("*") if path.is_file()] == []


def test_the_store_answers_about_what_it_has_not(store: ObjectStore) -> None:
    absent = "0" * 64
    assert not store.path(absent).exists()
    with pytest.raises(StorageError, match=absent):
        store.open(absent)
    with pytest.raises(UnknownName, match=absent):
        store.load_manifest(absent)
    for text in ("", "../../etc/passwd", "0" * 63, "A" * 64, "0" * 64 + "\n"):
        with pytest.raises(UsageError, match="is no SHA-256"):
            store.path(text)
        with pytest.raises(UsageError, match="is no SHA-256"):
            store.load_manifest(text)


def test_a_manifest_that_was_changed_is_not_believed(payload: Path, store: ObjectStore) -> None:
    bundle = build_bundle(payload, store)
    path = store.root / "bundles" / f"{bundle.id}.json"
    path.write_bytes(path.read_bytes().replace(b"run.py", b"ran.py"))
    with pytest.raises(StorageError, match="damaged"):
        store.load_manifest(bundle.id)


# Which folder


def test_a_payload_is_found_by_its_name(project: Path, payload: Path) -> None:
    assert find_payload(project, "probe") == payload


def test_an_unknown_payload_lists_the_known_ones(project: Path) -> None:
    with pytest.raises(UnknownName, match=r"no payload 'prob'.*known are probe; did you mean 'probe'"):
        find_payload(project, "prob")


@pytest.mark.parametrize("name", ["../probe", "/etc", "a/b", "..", ".", "", "-x", "a b", "a\n"])
def test_a_name_that_could_leave_the_project_is_refused(project: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no payload name"):
        find_payload(project, name)


def test_a_folder_that_leads_out_of_the_project_is_refused(project: Path, tmp_path: Path) -> None:
    _put(tmp_path / "elsewhere/x.py", "x")
    (project / "payloads/out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PayloadRefused, match="leads out of the project"):
        find_payload(project, "out")


def test_a_folder_linked_from_within_the_project_is_fine(project: Path, store: ObjectStore) -> None:
    _put(project / "lib/shared/x.py", "x")
    (project / "payloads/shared").symlink_to("../lib/shared")
    assert _paths(build_bundle(find_payload(project, "shared"), store)) == ["shared/x.py"]


# Where it comes from


def test_a_clean_payload_names_its_commit(project: Path, payload: Path, store: ObjectStore) -> None:
    commit = _commit(project)
    _git(project, "remote", "add", "fork", "https://fork.invalid/x")
    _git(project, "remote", "add", "origin", REMOTE)
    _put(project / "elsewhere.txt", "not part of the payload")
    assert build_bundle(payload, store).provenance == Provenance(
        commit=commit, branch="main", remote="https://example.invalid/team/project.git"
    )


def test_uncommitted_changes_are_kept_as_a_diff(project: Path, payload: Path, store: ObjectStore) -> None:
    commit = _commit(project)
    _put(payload / "run.py", "print('changed')\n")
    found = build_bundle(payload, store).provenance
    assert (found.commit, found.dirty, found.untracked) == (commit, True, 0)
    assert found.diff_sha256 is not None
    with store.open(found.diff_sha256) as file:
        diff = file.read()
    assert diff == subprocess.check_output(["git", "diff", "HEAD", "--", payload], cwd=project)
    _put(payload / "run.py", "print('hello')\n")
    subprocess.run(["git", "apply"], input=diff, cwd=project, check=True)
    assert (payload / "run.py").read_text() == "print('changed')\n"


def test_a_change_elsewhere_in_the_repository_does_not_make_a_payload_dirty(
    project: Path, payload: Path, store: ObjectStore
) -> None:
    _put(project / "payloads/other/x.py", "x")
    _commit(project)
    _put(project / "payloads/other/x.py", "y")
    assert not build_bundle(payload, store).provenance.dirty


@pytest.mark.parametrize("change", ["staged", "deleted", "mode"])
def test_staged_deleted_and_mode_changes_are_changes(
    project: Path, payload: Path, store: ObjectStore, change: str
) -> None:
    _commit(project)
    if change == "staged":
        _put(payload / "run.py", "x")
        _git(project, "add", "--all")
    elif change == "deleted":
        (payload / "run.py").unlink()
    else:
        (payload / "run.py").chmod(0o755)
    found = build_bundle(payload, store).provenance
    assert found.dirty
    assert found.diff_sha256 is not None


def test_a_touched_file_is_no_change(project: Path, payload: Path, store: ObjectStore) -> None:
    _commit(project)
    os.utime(payload / "run.py", (1, 1))
    assert not build_bundle(payload, store).provenance.dirty


def test_shipped_files_that_git_ignores_count_as_untracked(
    project: Path, payload: Path, store: ObjectStore
) -> None:
    _put(project / ".gitignore", "build/\n")
    _commit(project)
    _put(payload / "build/kernel.py", "x")
    _put(payload / "new\nfile 'x'.py", "x")
    _put(payload / "__pycache__/a.pyc", "x")
    found = build_bundle(payload, store).provenance
    assert (found.untracked, found.dirty, found.diff_sha256) == (2, True, None)


def test_a_tracked_secret_that_changed_is_not_kept_in_the_diff(
    project: Path, payload: Path, store: ObjectStore
) -> None:
    _put(payload / "sub/.ENV", "old")
    _put(payload / ".ssh/deep/key", "old")
    _commit(project)
    _put(payload / "sub/.ENV", "s3cret")
    _put(payload / ".ssh/deep/key", "s3cret")
    found = build_bundle(payload, store).provenance
    assert (found.dirty, found.diff_sha256) == (False, None)
    _put(payload / "run.py", "x")
    build_bundle(payload, store)
    stored = [path.read_bytes() for path in store.root.rglob("*") if path.is_file()]
    assert not any(b"s3cret" in content for content in stored)


def test_settings_of_the_user_do_not_change_the_diff(
    project: Path, payload: Path, store: ObjectStore, tmp_path: Path
) -> None:
    _commit(project)
    _put(payload / "run.py", "x")
    plain = build_bundle(payload, store).provenance
    for key, value in (
        *(
            ("diff.noprefix", "true"),
            ("color.ui", "always"),
            ("diff.external", f"touch '{tmp_path}/ran'; true"),
        ),
        *(
            ("diff.mnemonicPrefix", "true"),
            ("diff.relative", "true"),
            ("core.fsmonitor", f"touch '{tmp_path}/ran'"),
        ),
    ):
        _git(project, "config", key, value)
    assert build_bundle(payload, store).provenance == plain
    assert not (tmp_path / "ran").exists()


def test_a_git_hook_s_environment_does_not_redirect_the_question(
    project: Path, payload: Path, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _commit(project)
    (tmp_path / "other").mkdir()
    _git(tmp_path / "other", "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "absent"))
    assert build_bundle(payload, store).provenance == Provenance(commit=commit, branch="main")


def test_a_detached_head_has_no_branch(project: Path, payload: Path, store: ObjectStore) -> None:
    commit = _commit(project)
    _git(project, "checkout", "--quiet", "--detach")
    assert build_bundle(payload, store).provenance == Provenance(commit=commit)


def test_a_repository_without_a_commit_is_dirty(project: Path, payload: Path, store: ObjectStore) -> None:
    _git(project, "init", "--quiet", "--initial-branch=main")
    assert build_bundle(payload, store).provenance == Provenance(branch="main", dirty=True, untracked=2)


def test_without_a_repository_nothing_is_known(payload: Path, store: ObjectStore) -> None:
    assert build_bundle(payload, store).provenance == Provenance()


def test_without_git_nothing_is_known(
    project: Path, payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _commit(project)
    monkeypatch.setenv("PATH", str(project))
    assert build_bundle(payload, store).provenance == Provenance()


def test_a_repository_that_git_does_not_trust_tells_nothing(
    project: Path, payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _commit(project)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert build_bundle(payload, store).provenance == Provenance()


def test_a_git_that_does_not_answer_is_not_waited_for(
    project: Path, payload: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _put(project / "bin/git", "#!/bin/sh\nexec sleep 600\n", 0o755)
    monkeypatch.setenv("PATH", f"{project / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(provenance, "_TIMEOUT_S", 0.05)
    assert build_bundle(payload, store).provenance == Provenance()


@pytest.mark.parametrize(
    ("url", "stripped"),
    [
        (REMOTE, "https://example.invalid/team/project.git"),
        ("https://s3cret@example.invalid/x", "https://example.invalid/x"),
        ("https://a@b:s3cret@example.invalid:8443/x@y", "https://example.invalid:8443/x@y"),
        ("https://example.invalid/x?token=s3cret#s3cret", "https://example.invalid/x"),
        ("ssh://git@example.invalid:22/x", "ssh://example.invalid:22/x"),
        ("https://me:s3/cret@example.invalid/x", None),
        ("https://me:s3cret@[::1]:8443/x", "https://[::1]:8443/x"),
        ("git@example.invalid:team/x.git", "git@example.invalid:team/x.git"),
        ("../local/x.git", "../local/x.git"),
        ("file:///srv/x.git", "file:///srv/x.git"),
    ],
)
def test_credentials_never_leave_a_remote_s_address(
    project: Path, payload: Path, store: ObjectStore, url: str, stripped: str | None
) -> None:
    _git(project, "init", "--quiet")
    _git(project, "config", "remote.upstream.url", url)
    assert build_bundle(payload, store).provenance.remote == stripped


def test_provenance_survives_the_wire(project: Path, payload: Path, store: ObjectStore) -> None:
    commit = _commit(project)
    assert json.loads(json.dumps(build_bundle(payload, store).provenance.as_json())) == {
        "commit": commit,
        "branch": "main",
        "dirty": False,
        "untracked": 0,
        "remote": None,
        "diff_sha256": None,
    }


def test_a_script_is_shipped_alone_under_its_own_name(tmp_path: Path, store: ObjectStore) -> None:
    script = tmp_path / 'it\'s a "probe"\n.py'
    _put(script, "print(1)\n")
    _put(tmp_path / "other.py", "print(2)\n")
    bundle = build_script_bundle(script, store)
    assert [(entry.path, entry.size_bytes) for entry in bundle.entries] == [(script.name, 9)]
    assert store.load_manifest(bundle.id).entries == bundle.entries
    assert bundle.provenance == Provenance()
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert [entry.path for entry in build_script_bundle(link, store).entries] == ["link.py"]


def test_a_script_s_commit_is_told_and_only_its_own_change_is_one(tmp_path: Path, store: ObjectStore) -> None:
    for name in ("a[1].py", "a1.py"):
        _put(tmp_path / name, "print(1)\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    _put(tmp_path / "a1.py", "print(2)\n")
    clean = build_script_bundle(tmp_path / "a[1].py", store).provenance
    dirty = build_script_bundle(tmp_path / "a1.py", store).provenance
    assert clean.commit == dirty.commit is not None
    assert (clean.dirty, clean.diff_sha256) == (False, None)
    assert dirty.dirty
    assert dirty.diff_sha256 is not None
    with store.open(dirty.diff_sha256) as diff:
        assert b"+print(2)" in diff.read()
    _put(tmp_path / "new.py", "")
    assert build_script_bundle(tmp_path / "new.py", store).provenance.untracked == 1


@pytest.mark.parametrize("name", ["id_rsa.py", ".env.py", "missing.py", "folder.py", "large.py"])
def test_a_script_that_no_payload_could_hold_is_refused(
    tmp_path: Path, store: ObjectStore, name: str
) -> None:
    (tmp_path / "folder.py").mkdir()
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    if "missing" not in name and not (tmp_path / name).exists():
        _put(tmp_path / name, "")
    with pytest.raises(PayloadRefused):
        build_script_bundle(tmp_path / name, store)


def test_nothing_is_a_bundle_too(store: ObjectStore) -> None:
    bundle = empty_bundle(store)
    assert bundle.entries == ()
    assert store.load_manifest(bundle.id).entries == ()
