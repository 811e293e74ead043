"""What every field of inventory and experiment makes of text that a shell, ssh or a terminal would act on.

The fields are taken from the forms themselves. A new one fails `test_every_field_of_the_form_is_fed` until
`INVENTORY` or `EXPERIMENT` has a line for it: where the text is put, which texts are accepted there, and how
it is read back; for a field that takes no text its path is the whole line. Of what a form takes as anything
(``devices``, ``timeout``) only the name is known here: its spellings are listed by hand.

An accepted text arrives as it was written; any other is refused in one line that names file and field. What
becomes of accepted ones on a host is tests/integration/test_metacharacters.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml

from orchestrator import experiment, inventory
from orchestrator.errors import ConfigError
from orchestrator.strict_model import StrictModel
from tests.metacharacters import ATTACKS

TEXT = "<text>"  # in a file's keys, and in what stands there: the text goes here
LONGEST_MESSAGE = 400

EVERYTHING = frozenset(ATTACKS)
NOTHING: frozenset[str] = frozenset()
ONLY_LONG = frozenset({"long"})
VARIABLE = EVERYTHING - {"nul"}
VISIBLE = EVERYTHING - {"newline", "nul", "override"}
IN_A_PATH = VISIBLE - {"long"}
IN_A_SEARCHED_PATH = IN_A_PATH - {"colon"}
FILE_HERE = IN_A_PATH - {"option", "help", "dash"}
SHIPPED_FILE = VISIBLE - {"home", "option", "help", "dash"}
NAME_OF_A_METRIC = VISIBLE - {"option", "help", "dash"}


@dataclass(frozen=True, kw_only=True)
class Field:
    """``path`` is the form's, ``at`` the keys in a file and ``holds`` what stands there; ``rest`` stands
    beside it. Of the texts those in ``accepts`` are, and ``read`` finds what became of one.
    """

    path: str
    at: tuple[str | int, ...]
    holds: Any = TEXT
    rest: dict[str, Any]
    accepts: frozenset[str] = NOTHING
    read: Callable[[Any], Any] = repr

    def written(self, text: str) -> str:
        """Returns what is written into the file at this field."""
        told: str = TEXT if TEXT in self.at else self.holds
        return told.replace(TEXT, text)

    def document(self, text: str) -> dict[str, Any]:
        value = self.holds.replace(TEXT, text) if isinstance(self.holds, str) else self.holds
        for key in reversed(self.at):
            value = [value] if isinstance(key, int) else {key.replace(TEXT, text): value}
        document: dict[str, Any] = _merged(self.rest, value)
        return document


# The inventory

SSH = {"transport": "ssh"}
CONTAINER = {"transport": "proxmox", "vmid": 200, "node": {"transport": "ssh", "address": "pve"}}


def _host(path: str, *keys: str, host: dict[str, Any] = SSH, **settings: Any) -> Field:
    at = ("hosts", "h", *(keys or path.split(".")))
    return Field(path=f"hosts.*.{path}", at=at, rest={"hosts": {"h": host}}, **settings)


def _of_host(name: str) -> dict[str, Any]:
    return {"read": lambda hosts: str(getattr(hosts.host("h"), name))}


def _identity(hosts: inventory.Inventory) -> str:
    """Returns a path beside the inventory as it was written; ``~root`` is the home of somebody here."""
    host = hosts.host("h")
    identity = (host.node or host).identity
    assert identity is not None
    if identity == Path("~root").expanduser():
        return "~root"
    beside = hosts.path.parent
    return str(identity.relative_to(beside) if identity.is_relative_to(beside) else identity)


def _way(prefix: str, host: dict[str, Any]) -> Iterator[Field]:
    """What is said of the way to a host, or to a container's node."""
    for key in ("transport", "address", "port", "user", "host_key"):
        yield _host(prefix + key, host=host)
    for holds, accepts in ((TEXT, FILE_HERE), (f"/keys/{TEXT}", IN_A_PATH)):
        yield _host(prefix + "identity", host=host, holds=holds, accepts=accepts, read=_identity)
    yield _host(prefix + "host_key", host=host, holds=f"ssh-ed25519 {TEXT}")


INVENTORY = (
    Field(path="hosts.{}", at=("hosts", TEXT), holds=SSH, rest={"hosts": {}}),
    *_way("", SSH),
    *_way("node.", CONTAINER),
    _host("node", host={"transport": "proxmox", "vmid": 200}),
    _host("vmid", host=CONTAINER),
    _host("python"),
    _host("python", holds=f"/opt/{TEXT}/python", accepts=IN_A_PATH, **_of_host("python")),
    _host("venv"),
    _host("venv", holds=f"~/{TEXT}", accepts=IN_A_SEARCHED_PATH, **_of_host("venv")),
    _host("workdir"),
    _host("workdir", holds=f"/work/{TEXT}", accepts=IN_A_PATH, **_of_host("workdir")),
    _host("root"),
    _host("root", holds=f"/srv/{TEXT}/orch", accepts=IN_A_SEARCHED_PATH, **_of_host("root")),
    _host("import_container_env"),
    _host("setup.script", accepts=SHIPPED_FILE, read=lambda hosts: hosts.host("h").setup.path),
    _host("setup.requirements", accepts=SHIPPED_FILE, read=lambda hosts: hosts.host("h").setup.path),
    _host("setup.system_packages"),
    _host(
        "env.{}",
        "env",
        TEXT,
        holds="x",
        accepts=ONLY_LONG,
        read=lambda hosts: next(iter(hosts.host("h").env)),
    ),
    _host("env.*", "env", "NAME", accepts=VARIABLE, read=lambda hosts: hosts.host("h").env["NAME"]),
    _host("env.*", "env", "NAME", "from_env", host={**SSH, "env": {"NAME": {"secret": True}}}),
    _host("env.*", "env", "NAME", TEXT, holds="x"),
    *(
        Field(
            path="estimate.python",
            at=("estimate", "python"),
            holds=holds,
            rest={"hosts": {"h": SSH}},
            accepts=accepts,
            read=lambda hosts: hosts.estimate_python,
        )
        for holds, accepts in ((TEXT, NOTHING), (f"/opt/{TEXT}/python", IN_A_PATH))
    ),
)

# An experiment

BASE = {"payload": "probe", "run": "probe.trial", "params": {"a": "old", "held": {"b": "old"}}}


def _field(path: str, *keys: str | int, **settings: Any) -> Field:
    return Field(path=path, at=keys or tuple(path.split(".")), rest=BASE, **settings)


def _overlay(prefix: str, *above: str) -> Iterator[Field]:
    """What an experiment says itself, or one of its profiles."""

    def field(path: str, *keys: str | int, **settings: Any) -> Field:
        return _field(prefix + path, *above, *(keys or path.split(".")), **settings)

    for key in (
        "alloc_conf",
        "devices",
        "timeout",
        "grace",
        "on_disk_full",
        "log_limit",
        "collect",
        "collect_limit",
        "processes",
        "memory_limit",
        "expect.verdict",
    ):
        yield field(key)
    yield field(
        "params.{}", "params", TEXT, holds=1, accepts=NOTHING if above else ONLY_LONG, read=_last_param
    )
    yield field("params.*", "params", "a", accepts=EVERYTHING, read=lambda it: it.params["a"])
    yield field("params.*", "params", "held", "b", accepts=EVERYTHING, read=lambda it: it.params["held"]["b"])
    yield field("params.*", "params", "a", 0, accepts=EVERYTHING, read=lambda it: it.params["a"][0])
    yield field("env.{}", "env", TEXT, holds="x", accepts=ONLY_LONG, read=lambda it: next(iter(it.env)))
    yield field("env.*", "env", "NAME", accepts=VARIABLE, read=lambda it: it.env["NAME"])
    yield field("env.*", "env", "NAME", "from_env")
    yield field("alloc_conf", "alloc_conf", TEXT, holds=True)
    yield field("alloc_conf", "alloc_conf", "backend")
    yield field("alloc_conf", holds=f"backend:native,{TEXT}")
    yield field("devices", "devices", 0)
    yield field("devices", "devices", 0, holds=f"GPU-{TEXT}")
    yield field("devices", "devices", TEXT, holds=1)
    yield field("devices", "devices", "count")
    for kind in ("script", "requirements"):
        yield field(f"setup.{kind}", accepts=SHIPPED_FILE, read=lambda it: it.setup.path)
    yield field("setup.system_packages")
    yield field("collect", "collect", 0, accepts=NAME_OF_A_METRIC - {"long"}, read=lambda it: it.collect[0])
    yield field("expect.verdict", "expect", "verdict", 0)
    yield field(
        "expect.metrics.{}",
        "expect",
        "metrics",
        TEXT,
        holds={"min": 0},
        accepts=NAME_OF_A_METRIC,
        read=lambda it: next(iter(it.expect.metrics)),
    )
    yield field("expect.metrics.*.min", "expect", "metrics", "loss", "min")
    yield field("expect.metrics.*.max", "expect", "metrics", "loss", "max")


def _last_param(loaded: experiment.Experiment) -> str:
    return [*loaded.params][-1]


def _first_case(loaded: experiment.Experiment) -> experiment.Experiment:
    case = loaded.cases()[0]
    assert case.case is not None
    assert case.case.isprintable()
    return case


EXPERIMENT = (
    _field("payload"),
    _field("run"),
    _field("run", holds=f"probe.{TEXT}", accepts=ONLY_LONG, read=lambda it: it.module),
    *_overlay(""),
    _field("profiles.{}", "profiles", TEXT, holds={}),
    *_overlay("profiles.*.", "profiles", "p"),
    _field("matrix.params.{}", "matrix", "params", TEXT, holds=[1]),
    _field(
        "matrix.params.*.[]",
        "matrix",
        "params",
        "a",
        0,
        accepts=EVERYTHING,
        read=lambda it: _first_case(it).params["a"],
    ),
    _field(
        "matrix.env.{}",
        "matrix",
        "env",
        TEXT,
        holds=["x"],
        accepts=ONLY_LONG,
        read=lambda it: next(iter(_first_case(it).env)),
    ),
    _field(
        "matrix.env.*.[]",
        "matrix",
        "env",
        "NAME",
        0,
        accepts=VARIABLE,
        read=lambda it: _first_case(it).env["NAME"],
    ),
    _field("matrix.alloc_conf.[]", "matrix", "alloc_conf", 0),
    _field("matrix.at_once"),
)

FORMS: dict[str, tuple[type[StrictModel], tuple[Field, ...]]] = {
    "inventory.yaml": (inventory._Document, INVENTORY),
    "trial.yaml": (experiment._Document, EXPERIMENT),
}
OPEN = {"hosts.*.node": inventory._Node}  # fields that are declared as anything, and may be of a form


@pytest.mark.parametrize("file", FORMS)
def test_every_field_of_the_form_is_fed(file: str) -> None:
    form, fields = FORMS[file]
    assert {field.path for field in fields} == set(_paths(form))


@pytest.mark.parametrize(
    ("file", "field"),
    [pytest.param(file, field, id=field.path) for file, (_, fields) in FORMS.items() for field in fields],
)
def test_a_text_arrives_as_written_or_is_refused_by_file_and_field(
    file: str, field: Field, tmp_path: Path
) -> None:
    for name, text in ATTACKS.items():
        path = tmp_path / file
        path.write_text(_spelt(field.document(text)))
        if name in field.accepts:
            assert field.read(_load(path, field)) == field.written(text), name
            continue
        with pytest.raises(ConfigError) as refused:
            _load(path, field)
        message = str(refused.value)
        assert message.startswith(f"{path}:"), name
        assert message.isprintable(), name
        assert len(message) - len(str(path)) < LONGEST_MESSAGE, name
        named = [key for key in field.at if isinstance(key, str) and key != TEXT]
        assert named[-1] in message, message
        assert refused.value.exit_code == 2


def _spelt(document: dict[str, Any]) -> str:
    """Returns it as JSON, which is YAML but for keys of more than 1024 characters."""
    spelt = json.dumps(document)
    return spelt if max(map(len, spelt.split('"'))) <= 1024 else yaml.safe_dump(document)


def _load(path: Path, field: Field) -> Any:
    if path.name == "inventory.yaml":
        return inventory.load_inventory(path)
    return experiment.load_experiment(path, profile="p" if field.at[:2] == ("profiles", "p") else None)


def _paths(form: type[StrictModel], above: str = "") -> Iterator[str]:
    """Yields each place of a form that takes a value: ``{}`` stands for a mapping's keys, ``*`` for each."""
    for name, hint in form.fields().items():
        yield from _places(hint, above + name)


def _places(hint: Any, path: str) -> Iterator[str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        yield from _places(next(kind for kind in arguments if kind is not NoneType), path)
    elif origin is Annotated:
        yield from _places(arguments[0], path)
    elif origin is dict:
        yield f"{path}.{{}}"
        yield from _places(arguments[1], f"{path}.*")
    elif origin is list:
        yield from _places(arguments[0], f"{path}.[]")
    elif isinstance(hint, type) and issubclass(hint, StrictModel):
        yield from _paths(hint, f"{path}.")
    else:
        yield path
        if path in OPEN:
            yield from _paths(OPEN[path], f"{path}.")


def _merged(base: Any, change: Any) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in change.items()}}
    return change
