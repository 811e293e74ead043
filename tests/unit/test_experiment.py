"""Experiment files, their profiles, and what --set changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError, UnknownName, UsageError
from orchestrator.experiment import Bounds, Expectation, Experiment, load_experiment
from orchestrator.fields import Secret

FULL = """\
payload: dflash
run: dflash.probe
params:
  anchors: 1024
  lr: 1e-5
  sizes: [1, 2]
  optimizer: {name: adamw, betas: [0.9, 0.95]}
  note: null
  extra: {}
env: {HF_HOME: /models, FLAG: "true"}
alloc_conf: {expandable_segments: true}
devices: [5]
timeout: 10m
expect:
  verdict: oom
  metrics:
    peak_gib: {max: 96}
    streak: {min: 0.5, max: 31}
profiles:
  small:
    params: {anchors: 64, optimizer: {name: sgd}, extra: {x: 1}}
    env: {FLAG: "false", EXTRA: "1"}
    alloc_conf: {pinned_use_background_threads: true}
    devices: none
    timeout: null
    expect: {verdict: [ok, failed], metrics: {peak_gib: {max: 24}}}
  fixed: {alloc_conf: "max_split_size_mb:128"}
  plain: {}
"""


def _write(folder: Path, text: str, name: str = "oom_probe.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _load(folder: Path, *overrides: str, profile: str | None = None, text: str = FULL) -> Experiment:
    return load_experiment(_write(folder, text), profile=profile, overrides=overrides)


def _with(**fields: Any) -> str:
    return json.dumps({"payload": "dflash", "run": "dflash.probe", **fields})


def test_every_field_arrives(tmp_path: Path) -> None:
    assert _load(tmp_path) == Experiment(
        name="oom_probe",
        path=tmp_path / "oom_probe.yaml",
        payload="dflash",
        module="dflash.probe",
        params={
            "anchors": 1024,
            "lr": 1e-5,
            "sizes": [1, 2],
            "optimizer": {"name": "adamw", "betas": [0.9, 0.95]},
            "note": None,
            "extra": {},
        },
        env={"HF_HOME": "/models", "FLAG": "true"},
        alloc_conf="expandable_segments:True",
        devices=("5",),
        timeout_s=600.0,
        expect=Expectation(
            verdicts=("oom",), metrics={"peak_gib": Bounds(max=96.0), "streak": Bounds(min=0.5, max=31.0)}
        ),
        profile=None,
        cardless_profiles=("small",),
    )


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    experiment = _load(tmp_path, text="payload: dflash\nrun: dflash\n")
    assert (experiment.params, experiment.env, experiment.alloc_conf) == ({}, {}, None)
    assert (experiment.devices, experiment.timeout_s, experiment.expect) == ((), None, Expectation())


def test_a_profile_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    small = _load(tmp_path, profile="small")
    assert small.profile == "small"
    assert small.params == {
        "anchors": 64,
        "lr": 1e-5,
        "sizes": [1, 2],
        "optimizer": {"name": "sgd", "betas": [0.9, 0.95]},
        "note": None,
        "extra": {"x": 1},
    }
    assert small.env == {"HF_HOME": "/models", "FLAG": "false", "EXTRA": "1"}
    assert small.alloc_conf == "expandable_segments:True,pinned_use_background_threads:True"
    assert (small.devices, small.timeout_s) == ((), None)
    assert small.expect.verdicts == ("ok", "failed")
    assert small.expect.metrics == {"peak_gib": Bounds(max=24.0), "streak": Bounds(min=0.5, max=31.0)}


def test_allocator_settings_written_as_text_replace_all_others(tmp_path: Path) -> None:
    assert _load(tmp_path, profile="fixed").alloc_conf == "max_split_size_mb:128"
    cleared = FULL.replace("plain: {}", 'plain: {alloc_conf: ""}')
    assert _load(tmp_path, profile="plain", text=cleared).alloc_conf is None


def test_an_empty_profile_changes_nothing_but_its_name(tmp_path: Path) -> None:
    plain, base = _load(tmp_path, profile="plain"), _load(tmp_path)
    assert plain.profile == "plain"
    assert (plain.params, plain.env, plain.expect, plain.devices) == (
        base.params,
        base.env,
        base.expect,
        base.devices,
    )
    assert (plain.alloc_conf, plain.timeout_s) == (base.alloc_conf, base.timeout_s)


def test_an_unknown_profile_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UnknownName, match=r"no profile 'smal'; known are small, fixed, plain; did you mean 'small'"
    ):
        _load(tmp_path, profile="smal")
    with pytest.raises(UnknownName, match="known are none"):
        _load(tmp_path, profile="x", text=_with())


@pytest.mark.parametrize(
    ("override", "keys", "value"),
    [
        ("lr=1e-5", ["lr"], 1e-5),
        ("lr=3", ["lr"], 3),
        ("anchors=-1", ["anchors"], -1),
        ("note=yes", ["note"], "yes"),
        ("note=a=b", ["note"], "a=b"),
        ("note='x: y'", ["note"], "x: y"),
        ("note=null", ["note"], None),
        ("sizes=[3, 1e-5]", ["sizes"], [3, 1e-5]),
        ("optimizer.name=sgd", ["optimizer", "name"], "sgd"),
        ("optimizer.betas=[0.5]", ["optimizer", "betas"], [0.5]),
        ("extra={x: {y: true}}", ["extra", "x", "y"], True),
    ],
)
def test_an_override_sets_one_declared_parameter(
    tmp_path: Path, override: str, keys: list[str], value: object
) -> None:
    changed: Any = _load(tmp_path, override).params
    assert {**changed, keys[0]: None} == {**_load(tmp_path).params, keys[0]: None}
    for key in keys:
        changed = changed[key]
    assert changed == value
    assert type(changed) is type(value)


def test_overrides_come_after_the_profile(tmp_path: Path) -> None:
    assert _load(tmp_path, "anchors=7", profile="small").params["anchors"] == 7
    assert _load(tmp_path, "extra.x=2", profile="small").params["extra"] == {"x": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["anchor=1"], "'anchor' names no parameter.*did you mean 'anchors'"),
        (["zzz=1"], "declared are anchors, lr, sizes, optimizer, note, extra"),
        (["optimizer.nam=1"], "'optimizer.nam' names no parameter.*did you mean 'name'"),
        (["lr.x=1"], "'lr.x' names no parameter"),
        (["extra.x=1"], "'extra.x' names no parameter"),
        (["optimizer.=1"], "names no parameter"),
        (["lr"], "must be key=value"),
        (["=1"], "must be key=value"),
        (["lr="], "is empty"),
        (["lr=#1"], "is empty"),
        (["lr=[1"], "not valid YAML"),
        (["lr=a: b"], "block of YAML"),
        (["lr=.nan"], "no finite number"),
        (["lr=1", "lr=2"], "--set lr is given twice"),
        (["-x=1"], "'-x' names no parameter"),
        (["a\n\x1b=1"], "names no parameter"),
    ],
)
def test_an_override_that_cannot_be_meant_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _load(tmp_path, *overrides)
    assert str(caught.value).isprintable()


def _refused(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(folder, text=text)
    assert str(caught.value).isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("payload: dflash", "paylod: dflash", "unknown key 'paylod'; did you mean 'payload'"),
        ("payload: dflash", "payload: ../dflash", "payload: '../dflash' is no payload name"),
        ("payload: dflash", "payload: /dflash", "is no payload name"),
        ("run: dflash.probe", "run: dflash/probe.py", "run: .*write 'dflash.probe'"),
        ("run: dflash.probe", "run: other.probe", "run: 'other.probe' is not in the payload 'dflash'"),
        ("run: dflash.probe", "run: [dflash]", "run: must be text, not a list"),
        ("  anchors: 1024", "  anchors: 1024\n  anchors: 1024", "duplicate key"),
        ("  anchors: 1024", "  'an chors': 1024", "params.'an chors': use letters"),
        ("  anchors: 1024", "  a.b: 1024", "use letters"),
        ("  lr: 1e-5", "  lr: .inf", "no finite number"),
        ("env: {HF_HOME: /models", "env: {HF_HOME: true", "env.HF_HOME: is a boolean, .*quote it"),
        (
            "env: {HF_HOME: /models",
            "env: {CUDA_VISIBLE_DEVICES: '0'",
            "env.CUDA_VISIBLE_DEVICES: is set by orch: use devices:",
        ),
        (
            "alloc_conf: {expandable_segments: true}",
            "alloc_conf: {expandable_segment: true}",
            "alloc_conf.expandable_segment: is no allocator setting; did you mean 'expandable_segments'",
        ),
        (
            "alloc_conf: {expandable_segments: true}",
            "alloc_conf: {max_split_size_mb: 3}",
            "alloc_conf.max_split_size_mb: must be a whole number",
        ),
        (
            "alloc_conf: {expandable_segments: true}",
            "alloc_conf: expandable_segments",
            "alloc_conf: 'expandable_segments' is not key:value, which kills a process",
        ),
        ("alloc_conf: {expandable_segments: true}", "alloc_conf: true", "must be a mapping or text"),
        ("devices: [5]", "devices: [5, cuda:5]", r"devices\[1\]: .*write 5"),
        ("devices: [5]", "devices: 5", r"devices: must be 'none', a list .*example \[5\]"),
        ("devices: [5]", "devices: [5, '5']", "devices: 5 is listed twice"),
        ("devices: [5]", "devices: [MIG-0]", r"devices\[0\]: 'MIG-0' is no device"),
        ("devices: [5]", "devices: {count: 0}", "devices: count must be a number of cards from 1 to 64"),
        ("devices: [5]", "devices: {cuont: 2}", "devices: unknown key 'cuont'; .*did you mean 'count'"),
        ("devices: [5]", "devices: {count: 2, free_memory: 90}", "devices: .*is no size: use a number with"),
        ("timeout: 10m", "timeout: 0", "timeout: 0 is no duration"),
        ("timeout: 10m", "timeout: soon", "timeout: 'soon' is no duration"),
        ("  verdict: oom", "  verdict: oops", "'oops' is no verdict"),
        ("  verdict: oom", "  verdict: out_of_bounds", "is no verdict"),
        ("  verdict: oom", "  verdict: []", "at least one"),
        ("  verdict: oom", "  verdict: [ok, okay]", r"expect.verdict\[1\]: .*did you mean 'ok'"),
        ("  verdict: oom", "  verdict: {a: 1}", "is no verdict"),
        ("    peak_gib: {max: 96}", "    peak_gib: {mx: 96}", "unknown key 'mx'; did you mean 'max'"),
        ("    peak_gib: {max: 96}", "    peak_gib: {}", "a min, a max or both"),
        ("    peak_gib: {max: 96}", "    peak_gib: {min: 97, max: 96}", "min 97 is above max 96"),
        ("    peak_gib: {max: 96}", "    peak_gib: {max: '96'}", "must be a number"),
        ("    peak_gib: {max: 96}", '    "\\e[2J": {max: 96}', "expect.metrics: a metric's name must not"),
        ("  small:", "  -small:", "profiles: '-small' is no profile name"),
        ("anchors: 64", "anchor: 64", "profiles.small.params.anchor: .*did you mean 'anchors'"),
        ("{name: sgd}", "{nam: sgd}", "params.optimizer.nam: .*did you mean 'name'"),
        (
            '    env: {FLAG: "false"',
            "    env: {FLAG: false",
            "profiles.small.env.FLAG: .*quote it as 'false'",
        ),
        ("    devices: none", "    devices: all", "profiles.small.devices"),
        ("    timeout: null", "    timeout: never", "profiles.small.timeout"),
        ("    timeout: null", "    run: dflash.other", "profiles.small: unknown key 'run'"),
        (
            "{pinned_use_background_threads: true}",
            "{max_split_size_mb: 128}",
            "small.alloc_conf: .*keep one of the two",
        ),
        ("  plain: {}", "  plain:", "profiles.plain: must be a mapping, not empty"),
    ],
)
def test_a_mistake_anywhere_is_named_at_its_line_though_no_profile_is_chosen(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert FULL.count(old) == 1
    error = _refused(tmp_path, FULL.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        raise error
    before = FULL[: FULL.index(old)].count("\n")
    assert error.line == before + 1 + new.count("\n")


@pytest.mark.parametrize("missing", ["payload", "run"])
def test_what_must_be_there_is_asked_for(tmp_path: Path, missing: str) -> None:
    fields = {"payload": "dflash", "run": "dflash.probe"}
    del fields[missing]
    assert f"{missing}: is missing" in str(_refused(tmp_path, json.dumps(fields)))


AWKWARD = [
    "",
    " ",
    "-a",
    "--help",
    "a b",
    "a'b",
    'a"b',
    "a\nb",
    "a\0b",
    "a\x1b[2J",
    "a\u202eb",
    "../a",
    "a/b",
]


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("key", ["payload", "run", "timeout", "devices", "alloc_conf"])
def test_awkward_text_is_refused_where_a_name_or_setting_is_meant(
    tmp_path: Path, key: str, text: str
) -> None:
    if key == "alloc_conf" and not text.strip():
        return  # no setting at all
    _refused(tmp_path, _with(**{key: text}))


@pytest.mark.parametrize("text", [*AWKWARD, "s3cret 'x' \"y\""])
def test_awkward_text_is_kept_where_text_is_meant(tmp_path: Path, text: str) -> None:
    value = text.replace("\0", "")
    experiment = _load(tmp_path, text=_with(params={"note": text}, env={"NOTE": value}))
    assert experiment.params == {"note": text}
    assert experiment.env == {"NOTE": value}


@pytest.mark.parametrize("name", ["oom probe.yaml", "-x.yaml", "a\nb.yaml", "ä.yaml"])
def test_a_file_whose_name_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is no experiment name") as caught:
        load_experiment(_write(tmp_path, FULL, name))
    assert str(caught.value).isprintable()


def test_an_experiment_printed_by_accident_shows_no_environment(tmp_path: Path) -> None:
    assert "s3cret" not in repr(_load(tmp_path, text=_with(env={"TOKEN": "s3cret"})))


def test_an_expectation_survives_the_wire(tmp_path: Path) -> None:
    expect = _load(tmp_path).expect
    arrived = json.loads(json.dumps(expect.as_json()))
    assert arrived == {
        "verdicts": ["oom"],
        "metrics": {"peak_gib": {"min": None, "max": 96.0}, "streak": {"min": 0.5, "max": 31.0}},
    }
    assert Expectation.from_json(arrived) == expect


def test_a_secret_takes_the_place_of_a_variable_and_knows_its_line(tmp_path: Path) -> None:
    text = FULL.replace("EXTRA: ", "HF_HOME: {secret: true, from_env: MY_HOME}, EXTRA: ")
    small = _load(tmp_path, text=text, profile="small")
    line = text[: text.index("from_env")].count("\n") + 1
    where = f"{tmp_path / 'oom_probe.yaml'}:{line}"
    assert small.env["HF_HOME"] == Secret(name="HF_HOME", from_env="MY_HOME", where=where)
    assert _load(tmp_path, text=text).env["HF_HOME"] == "/models"


def test_a_malformed_secret_is_refused_at_its_line(tmp_path: Path) -> None:
    text = FULL.replace("HF_HOME: /models", "HF_HOME: {secret: true, from_env: hf_s3cret}")
    with pytest.raises(ConfigError, match=r"yaml:\d+: env.HF_HOME: from_env must be") as caught:
        _load(tmp_path, text=text)
    assert "s3cret" not in str(caught.value)


ENDING = """\
payload: dflash
run: dflash.probe
grace: 30s
on_disk_full: stop
log_limit: 2GiB
profiles:
  quick: {grace: 0, on_disk_full: wait, log_limit: null}
  plain: {}
"""


def test_grace_full_disks_and_the_log_s_limit_are_as_asked_and_a_profile_changes_them(tmp_path: Path) -> None:
    def ending(profile: str | None, text: str = ENDING) -> tuple[float, str, int | None]:
        loaded = _load(tmp_path, profile=profile, text=text)
        return loaded.grace_s, loaded.on_disk_full, loaded.log_limit_bytes

    assert ending(None) == ending("plain") == (30.0, "stop", 2 * 1024**3)
    assert ending("quick") == (0.0, "wait", None)
    assert ending(None, "payload: dflash\nrun: dflash\n") == (10.0, "wait", None)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("grace: 30s", "grace: soon", 3, "grace: 'soon' is no duration"),
        ("grace: 30s", "grace: 30d", 3, "grace: '30d' is too long"),
        ("on_disk_full: stop", "on_disk_full: stopp", 4, "on_disk_full: must be wait or stop.*mean 'stop'"),
        ("log_limit: 2GiB", "log_limit: 2GB", 5, "log_limit: '2GB' is no size"),
        ("log_limit: 2GiB", "log_limit: 15MiB", 5, "log_limit: must be at least 16MiB"),
        ("grace: 0,", "grace: -1,", 7, "profiles.quick.grace: -1 is no duration"),
    ],
)
def test_how_a_run_ends_is_checked_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _load(tmp_path, text=ENDING.replace(old, new))
    assert caught.value.line == line


COLLECT = """\
payload: dflash
run: dflash.probe
collect:
  - results/**/*.json
  - "*.csv"
collect_limit: 2GiB
profiles:
  quick: {collect: [], collect_limit: null}
  plain: {}
"""


def test_what_is_collected_is_as_asked_and_a_profile_changes_it(tmp_path: Path) -> None:
    def collected(profile: str | None, text: str = COLLECT) -> tuple[tuple[str, ...], int]:
        loaded = _load(tmp_path, profile=profile, text=text)
        return loaded.collect, loaded.collect_limit_bytes

    assert collected(None) == collected("plain") == (("results/**/*.json", "*.csv"), 2 * 1024**3)
    assert collected("quick") == collected(None, "payload: dflash\nrun: dflash\n") == ((), 1024**3)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"*.csv"', "../x", 5, r"collect\[1\]: '../x' must be a path below"),
        ('"*.csv"', "/etc/passwd", 5, r"collect\[1\]: '/etc/passwd' must be a path below"),
        ('"*.csv"', "7", 5, r"collect\[1\]: 7 is no pattern"),
        ("2GiB", "2GB", 6, "collect_limit: '2GB' is no size"),
        ("collect: [],", "collect: '*',", 8, r"profiles.quick.collect: must be a list"),
    ],
)
def test_what_is_collected_is_checked_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _load(tmp_path, text=COLLECT.replace(old, new))
    assert caught.value.line == line


def test_a_profile_can_take_a_metric_s_bounds_away(tmp_path: Path) -> None:
    text = FULL.replace("plain: {}", "plain: {expect: {metrics: {peak_gib: null, other: null}}}")
    assert _load(tmp_path, profile="plain", text=text).expect.metrics == {"streak": Bounds(min=0.5, max=31.0)}


RANKS = """\
payload: dflash
run: dflash.probe
processes: 4
memory_limit: 96GiB
env: {OMP_NUM_THREADS: "8"}
profiles:
  one:
    processes: 1
    memory_limit: null
    env: {MASTER_PORT: "29500"}
  plain: {}
"""


def test_ranks_and_a_card_s_size_are_as_asked_and_a_profile_changes_them(tmp_path: Path) -> None:
    def asked(profile: str | None, text: str = RANKS) -> tuple[int, int | None]:
        loaded = _load(tmp_path, profile=profile, text=text)
        return loaded.processes, loaded.memory_limit_bytes

    assert asked(None) == asked("plain") == (4, 96 * 1024**3)
    assert asked("one") == (1, None)
    assert asked(None, "payload: dflash\nrun: dflash\n") == (1, None)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("processes: 4", "processes: 0", 3, "processes: 0 is no number of processes"),
        ("memory_limit: 96GiB", "memory_limit: 96", 4, "memory_limit: 96 is no size"),
        ("memory_limit: 96GiB", "memory_limit: 0GiB", 4, "memory_limit: must be more than 0"),
        ("    processes: 1", "    processes: 2.5", 8, "profiles.one.processes: 2.5 is no number"),
        ("    processes: 1", "    processes: 2", 8, "MASTER_PORT is set by orch for each of 2 processes"),
        ("env: {OMP_NUM_THREADS", "env: {RANK", 3, "processes: RANK is set by orch for each of 4"),
        ("  plain: {}", "matrix: {env: {LOCAL_RANK: ['0', '1']}}", 11, "matrix.env: LOCAL_RANK is set by"),
    ],
)
def test_ranks_and_a_card_s_size_are_checked_with_their_line(
    tmp_path: Path, old: str, new: str, line: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _load(tmp_path, text=RANKS.replace(old, new))
    assert caught.value.line == line


def test_an_experiments_bare_name_is_told_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "trial.yaml").touch()
    for given in ("trial", "experiments/trial"):
        with pytest.raises(ConfigError, match=r"no such file; did you mean experiments/trial\.yaml\?"):
            load_experiment(Path(given))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_experiment(Path("other"))
