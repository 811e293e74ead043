"""The first code that runs on a host: it installs the supervisor when it is not there and hands over to it.

It arrives on standard input, as the whole program of ``python3 -I -S -c`` with `loader`, followed by one line
of JSON (nonce, root, digest) and the request. So the command line is constant, holds nothing of anybody's,
and one round trip is enough when the host already has this supervisor. `install` checks each file against the
digest that names the folder, every time, and a broken folder is replaced.
"""

import hashlib
import importlib
import json
import os
import sys
import time

TYPE_CHECKING = False  # typing itself would be an import to pay for
if TYPE_CHECKING:
    from typing import BinaryIO


def digest_of(files: "dict[str, bytes]") -> str:
    """Returns the hex SHA-256 that names a set of ``{file name: bytes}``."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(b"%s %d\n" % (name.encode("ascii"), len(files[name])))
        total.update(files[name])
    return total.hexdigest()


def safe_root(root: str) -> str:
    """Returns the absolute root folder, made 0700 when it is not there.

    Raises:
        OSError: it cannot be made, is not ours, or others may write to it.
    """
    path = os.path.realpath(os.path.expanduser(root))
    os.makedirs(path, mode=0o700, exist_ok=True)
    stat = os.stat(path)
    if stat.st_uid != os.geteuid():
        raise OSError("%s belongs to user id %d, not to %d" % (path, stat.st_uid, os.geteuid()))
    if stat.st_mode & 0o022:
        raise OSError("%s is writable by others (mode %o); chmod go-w it" % (path, stat.st_mode & 0o777))
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise OSError("%s is not writable for us" % path)
    return path


def installed(folder: str, digest: str) -> bool:
    """Tells whether ``folder`` holds exactly the supervisor called ``digest``."""
    try:
        names = [name for name in os.listdir(folder) if name != "__pycache__"]
        files = {}
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = file.read()
    except OSError:
        return False
    return digest_of(files) == digest


def install(folder: str, files: "dict[str, bytes]") -> None:
    """Puts ``files`` and their byte code at ``folder``, whole or not at all.

    Raises:
        OSError: the disk refused.
        SyntaxError: this Python cannot read the supervisor.
    """
    import py_compile  # noqa: PLC0415  (a start that installs nothing does not pay for these)
    import shutil  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    parent = os.path.dirname(folder)
    os.makedirs(os.path.dirname(parent), mode=0o700, exist_ok=True)
    made = tempfile.mkdtemp(prefix="new-", dir=os.path.dirname(parent))
    try:
        package = os.path.join(made, os.path.basename(folder))
        os.mkdir(package, 0o700)
        for name in files:
            path = os.path.join(package, name)
            with open(path, "wb") as file:
                file.write(files[name])
            try:
                py_compile.compile(path, dfile=os.path.join(folder, name), doraise=True)
            except py_compile.PyCompileError as error:
                raise SyntaxError(str(error)) from error
        if os.path.isdir(parent) and not installed(folder, os.path.basename(parent)):
            shutil.rmtree(parent)
        if not os.path.isdir(parent):
            os.rename(made, parent)
    except OSError:
        if not installed(folder, os.path.basename(parent)):  # else somebody else was quicker
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main(stream: "BinaryIO") -> None:
    """Speaks the opening of a conversation on ``stream`` (binary input) and standard output."""
    out = sys.stdout.buffer
    hello = json.loads(stream.readline())
    request = json.loads(stream.read(int(stream.readline())))
    out.write(b"\n\x00orch-wire-1 " + hello["nonce"].encode("ascii") + b"\n")

    def say(header: "dict[str, object]") -> None:
        head = json.dumps(dict(header, size=0)).encode("ascii")
        out.write(b"%d\n%s" % (len(head), head))
        out.flush()

    os.umask(0o077)
    try:
        root = safe_root(hello["root"])
        parent = os.path.join(root, "supervisor", hello["digest"])
        folder = os.path.join(parent, "supervisor")
        missing = not installed(folder, hello["digest"])
        if not missing:
            os.utime(parent)  # `orch gc` keeps what was used a moment ago
    except (OSError, UnicodeError) as error:
        say(
            {
                "error": "unfit-root",
                "message": "the root folder %r cannot be used: %s" % (hello["root"], error),
            }
        )
        return
    host = {"python": sys.version.split()[0], "executable": sys.executable, "t": time.time()}
    say({"hello": host, "supervisor": not missing})
    if missing:
        try:
            sources = json.loads(stream.read(int(stream.readline())))
            install(folder, {name: source.encode("utf-8") for name, source in sources.items()})
        except (OSError, ValueError, SyntaxError) as error:
            say(
                {
                    "error": "unfit",
                    "message": "the supervisor cannot be installed below %s: %s" % (root, error),
                }
            )
            return
        if not installed(folder, hello["digest"]):
            say({"error": "unfit", "message": "the supervisor arrived damaged at %s" % folder})
            return
    sys.path.insert(0, parent)
    service = importlib.import_module("supervisor.service")  # it is there only now

    service.serve(stream, root, request)
