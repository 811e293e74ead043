"""Runs `orch` with a wall clock that a file sets: ``stepped_clock.py FILE ARGUMENT…``.

FILE holds the seconds to add.
libfaketime, which sets a host's clock in these tests, breaks the waiting of a Python process with threads.
"""

import sys
import time
from pathlib import Path

from orchestrator.cli.main import main

if __name__ == "__main__":
    offset_file, sys.argv = Path(sys.argv[1]), sys.argv[1:]
    real_time = time.time
    time.time = lambda: real_time() + float(offset_file.read_text())
    main()
