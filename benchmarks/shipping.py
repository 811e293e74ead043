"""What a second start sends: 200 files of which one has changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from benchmarks.results import Figure, at_most
from benchmarks.rig import Rig

FILES = 200
FILE_BYTES = 4096
REPETITIONS = 3


def second_ship(rig: Rig) -> Iterator[Figure]:
    """Round trips from the open channel to the start, counted on the wire.

    A start with everything there takes one of them after the log-in; what a changed file adds is what its
    connection needs more than that.
    """
    experiment = rig.project.experiment("print('hello')\n", "many")
    folder = rig.project.folder / "payloads" / "probe" / "data"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"part{number:03}.txt").write_text(f"{number} " * (FILE_BYTES // 4))
    arguments = ("run", experiment, "--host", "counted", "--detach")
    rig.project.orch(*arguments)
    rig.counted.trips()
    # A busy machine splits what is sent together, which counts as another trip: the least is the protocol's.
    unchanged = changed = sys.maxsize
    for repetition in range(REPETITIONS):
        rig.project.orch(*arguments)
        unchanged = min(unchanged, rig.counted.trips())
        (folder / "part007.txt").write_text(f"change {repetition}" * (FILE_BYTES // 8))
        told = rig.project.orch(*arguments).err
        changed = min(changed, rig.counted.trips())
    sent = re.search(r"sent (\d+) files?, (\d+) bytes", told)
    assert sent is not None, f"the changed file was not sent: {told}"
    files, size_bytes = int(sent[1]), int(sent[2])
    yield at_most(
        2,
        name=f"second ship of {FILES} files, one changed",
        value=changed - unchanged + 1,
        unit="round trips",
        whole_connection=changed,
        unchanged_connection=unchanged,
    )
    yield at_most(1, name="files sent", value=files, unit="files", bytes=size_bytes)
