"""Runs tests/supervisor by the standard library alone, on whichever Python runs this file.

No test found is a failure, and with CI=true so is a skipped one.
"""

import os
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Returns the exit status."""
    tests = unittest.defaultTestLoader.discover(str(ROOT / "tests" / "supervisor"), top_level_dir=str(ROOT))
    result = unittest.TextTestRunner().run(tests)
    if not result.testsRun:
        print("error: tests/supervisor holds no tests", file=sys.stderr)
    if result.skipped and os.environ.get("CI") == "true":
        for test, reason in result.skipped:
            print(f"error: skipped in CI: {test}: {reason}", file=sys.stderr)
        return 1
    return 0 if result.testsRun and result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
