"""A scripted nvidia-smi: it prints what the files beside it say, which a test may change meanwhile."""

import os
from typing import Dict, Sequence

SCRIPT = """#!/bin/sh
here=$(dirname "$0")
case $1 in
    --query-gpu=*) cat "$here/cards"; exit "$(cat "$here/code")" ;;
    --query-compute-apps=*) cat "$here/apps" ;;
    -L) cat "$here/list" ;;
    *) echo "this nvidia-smi is not asked so: $*" >&2; exit 9 ;;
esac
"""


def uuid(number: int) -> str:
    """Returns the UUID of a scripted card."""
    return "GPU-%08d-0000-0000-0000-000000000000" % number


class ScriptedCards:
    """The folder of the script, to be put first on PATH."""

    def __init__(self, folder: str, count: int = 0) -> None:
        self.folder = folder
        os.mkdir(folder)
        script = os.path.join(folder, "nvidia-smi")
        self._write("nvidia-smi", SCRIPT)
        os.chmod(script, 0o755)
        for name in ("apps", "list"):
            self._write(name, "")
        self.used_mib: Dict[int, int] = dict.fromkeys(range(count), 0)
        self.mig: Sequence[int] = ()
        self.show()

    @property
    def env(self) -> Dict[str, str]:
        """The environment in which the script is the nvidia-smi."""
        return dict(os.environ, PATH=self.folder + ":" + os.environ["PATH"])

    def show(self, code: int = 0, text: str = "") -> None:
        """Has it print the cards as they are now, or ``text`` with an exit code."""
        rows = [
            "%d, %s, NVIDIA H200, 143771, %d, %s\n"
            % (number, uuid(number), used, "Enabled" if number in self.mig else "Disabled")
            for number, used in self.used_mib.items()
        ]
        self._write("cards", text or "".join(rows))
        self._write("code", str(code))

    def run_on(self, number: int, pid: int, used_mib: int) -> None:
        """Has one process on a card, and nothing on the others."""
        self._write("apps", "%s, %d, %d\n" % (uuid(number), pid, used_mib))
        self.used_mib = {card: used_mib if card == number else 0 for card in self.used_mib}
        self.show()

    def forget_programs(self) -> None:
        """Has no process on any card."""
        self._write("apps", "")

    def hang(self) -> None:
        """Has it never answer; that somebody asked shows as a file."""
        self._write("nvidia-smi", '#!/bin/sh\ntouch "$(dirname "$0")/hangs"\nexec sleep 60\n')
        os.chmod(os.path.join(self.folder, "nvidia-smi"), 0o755)

    def list(self, text: str) -> None:
        """Has ``nvidia-smi -L`` print this."""
        self._write("list", text)

    def _write(self, name: str, text: str) -> None:
        path = os.path.join(self.folder, name)
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(path + ".new", path)
