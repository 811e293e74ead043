"""Prepares one environment, as the payload of a run: a virtual environment from requirements, or by a script.

``python -I prepare.py JSON`` is told what to do by `setups`, whose lock its run holds. Success is noted in
``done``, as the last act; after a failure nothing is left, and what a killed one left goes first.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from typing import Any, Dict, List

UPON = "orch-upon.pth"
_stopped: List[bool] = []


def main(argument: str) -> int:
    """Does what ``argument`` asks for; returns the exit code."""
    asked = json.loads(argument)
    try:
        return _prepare(asked)
    except OSError as error:
        folder = asked["folder"]
        if isinstance(error, FileNotFoundError) and not os.path.isdir(folder):
            return _fail("%s has gone while it was being prepared: somebody removed it" % folder)
        return _fail("cannot prepare in %s: %s" % (folder, error))


def _prepare(asked: Dict[str, Any]) -> int:
    folder = asked["folder"]
    done = os.path.join(folder, "done")
    if os.path.exists(done):
        if not asked["force"]:
            print("it is there already: nothing to do")
            return 0
        os.unlink(done)
    signal.signal(signal.SIGTERM, lambda *_: _stopped.append(True))
    _clear(folder)
    os.makedirs(folder, mode=0o700)
    is_made = False
    try:
        code = _install(asked) if asked["kind"] == "requirements" else _run_script(asked)
        if code == 0:
            _write(done, dict(asked["note"], t=time.time()))
            is_made = True
    finally:
        if not is_made:
            _clear(folder)
    return code


def _install(asked: Dict[str, Any]) -> int:
    """Makes a virtual environment by this interpreter and lets pip read the requirements: a pip that is seen
    there already, or one of its own, which takes seconds and a module that Debian packs separately.
    """
    has_pip = asked["system_packages"] and importlib.util.find_spec("pip") is not None
    needed = ["venv"] if has_pip else ["venv", "ensurepip"]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        hint = "apt-get install python3-venv, or name another 'python:' in inventory.yaml"
        return _fail("%s has no module %s, to make environments: %s" % (sys.executable, lacking[0], hint))
    options = ["--without-pip"] if has_pip else []
    if asked["system_packages"] and _sees_system():
        options.append("--system-site-packages")
    code = _call([sys.executable, "-I", "-m", "venv", *options, asked["folder"]], asked["locks"])
    if code != 0:
        return code
    if asked["system_packages"] and sys.prefix != sys.base_prefix:
        _stand_upon_this(asked["folder"])
    python = os.path.join(asked["folder"], "bin", "python")
    pip = [python, "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    folder, name = os.path.split(asked["file"])
    return _call([*pip, "-r", name], asked["locks"], folder)


def _run_script(asked: Dict[str, Any]) -> int:
    folder, name = os.path.split(asked["file"])
    return _call(["./" + name], asked["locks"], folder)


def _sees_system() -> bool:
    """Tells whether this interpreter sees the packages of the system: a virtual environment may not."""
    try:
        with open(os.path.join(sys.prefix, "pyvenv.cfg"), encoding="utf-8") as file:
            pairs = [line.partition("=") for line in file]
    except OSError:
        return True
    return any(
        key.strip() == "include-system-site-packages" and value.strip() == "true" for key, _, value in pairs
    )


def _stand_upon_this(folder: str) -> None:
    """A virtual environment made by another's Python sees only the system's packages: adds the other's."""
    own = os.path.join(folder, "lib", "python%d.%d" % sys.version_info[:2], "site-packages")
    seen = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    with open(os.path.join(own, UPON), "w", encoding="utf-8") as file:
        file.writelines("import site; site.addsitedir(%r)\n" % path for path in seen)


def _call(arguments: List[str], locks: List[int], cwd: str = "/") -> int:
    """Runs a program with our streams; returns its exit code, 128 + n for signal n.

    It inherits the ``locks``: should we be killed, nobody begins before it has ended. A request to stop
    reaches it too: we see it end, and begin no other.
    """
    if _stopped:
        return 128 + signal.SIGTERM
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        code = subprocess.Popen(arguments, cwd=cwd, env=env, pass_fds=locks).wait()
    except OSError as error:
        return _fail("cannot start %s: %s" % (arguments[0], _why(os.path.join(cwd, arguments[0]), error)))
    return code if code >= 0 else 128 - code


def _why(program: str, error: OSError) -> str:
    """Returns why ``program`` cannot be executed: the kernel says the same of one that is not there and of
    one that is, whose interpreter is not.
    """
    if not os.access(program, os.X_OK):
        return str(error.strerror)
    with open(program, "rb") as file:
        first = file.readline(256)
    words = first[2:].strip(b" \t\n").split(None, 1) if first.startswith(b"#!") else []
    if not words:
        what = (
            "its #! line names no interpreter" if first.startswith(b"#!") else "nothing here can execute it"
        )
        return "%s: %s" % (what, error.strerror)
    named = os.fsdecode(words[0])
    if b"\r" in first:
        return "its lines end in CR LF, so that the interpreter of its #! line would be %r" % (named + "\r")
    return "%s, the interpreter of its #! line: %s" % (named, error.strerror)


def _fail(message: str) -> int:
    sys.stderr.write("orch: %s\n" % message)
    return 1


def _clear(folder: str) -> None:
    if os.path.lexists(folder):
        shutil.rmtree(folder)


def _write(path: str, value: Dict[str, Any]) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
