"""A run with a log limit on its host and here; what else unit tests share stands beside them."""

from pathlib import Path

import pytest

from tests.unit.limited_run import Here, Host


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def here(tmp_path: Path, host: Host) -> Here:
    return Here(tmp_path, host)
