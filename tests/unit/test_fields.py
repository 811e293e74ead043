"""Single fields of the YAML files: modules, variables, devices, durations."""

import subprocess

import pytest

from orchestrator import fields
from orchestrator.errors import UsageError
from orchestrator.fields import (
    CardCount,
    Secret,
    check_free_of_ranks,
    check_module,
    check_variable,
    devices_json,
    devices_text,
    parse_device,
    parse_devices,
    parse_duration,
    parse_grace,
    parse_memory,
    parse_processes,
    parse_size,
    parse_variable,
)
from orchestrator.supervisor.instrument import MEMORY_HISTORY_VARIABLE


@pytest.mark.parametrize("module", ["dflash", "dflash.probe", "dflash.cli.oom_2"])
def test_modules_of_the_payload_are_accepted(module: str) -> None:
    assert check_module(module, payload="dflash") == module


@pytest.mark.parametrize(
    ("module", "hint"),
    [
        ("dflash/probe.py", "dflash.probe"),
        ("dflashx.probe", "'dflash.'"),
        ("probe", "'dflash.'"),
        ("", "dotted"),
        ("dflash.", "dotted"),
        (".probe", "dotted"),
        ("-c", "dotted"),
        ("dflash.pro be", "dotted"),
        ("dflash.a\n", "dotted"),
    ],
)
def test_anything_else_is_no_module_of_the_payload(module: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        check_module(module, payload="dflash")


def test_a_module_outside_the_payload_names_both_since_either_may_be_misspelt() -> None:
    with pytest.raises(UsageError, match=r"^'hello\.train' is not in the payload 'helo'"):
        check_module("hello.train", payload="helo")


# Variables


@pytest.mark.parametrize(("name", "value"), [("A", ""), ("_b9", " '\"\n\t=$HOME ü"), ("HF_TOKEN", "s3cret")])
def test_a_variable_keeps_every_character_that_a_process_can_get(name: str, value: str) -> None:
    assert check_variable(name, value) == value


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\n", "-A", "Ä", "A-B", "A\0"])
def test_names_that_are_no_variables_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name for an environment variable"):
        check_variable(name, "x")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "alloc_conf"),
        ("PYTORCH_ALLOC_CONF", "alloc_conf"),
        ("CUDA_VISIBLE_DEVICES", "devices"),
        ("NVIDIA_VISIBLE_DEVICES", "devices"),
        ("PYTHONPATH", "payload"),
        ("ORCH_RUN_ID", "reserved"),
    ],
)
def test_reserved_variables_name_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(UsageError, match=instead):
        check_variable(name, "x")


def test_a_switch_of_the_instrument_is_0_or_1_and_no_secret() -> None:
    assert check_variable("ORCH_MEMORY_HISTORY", "0") == "0"
    with pytest.raises(UsageError, match="use '0' or '1'"):
        check_variable("ORCH_MEMORY_HISTORY", "off")
    with pytest.raises(UsageError, match="no secret"):
        parse_variable("ORCH_MEMORY_HISTORY", {"secret": True, "from_env": "X"}, where="x.yaml:1")


def test_the_switches_are_those_that_the_instrument_reads() -> None:
    assert fields._SWITCHES == (MEMORY_HISTORY_VARIABLE,)


def test_a_boolean_value_asks_for_quotes() -> None:
    with pytest.raises(UsageError, match=r"is a boolean.*'true' or '1'"):
        check_variable("FLAG", True)


@pytest.mark.parametrize(
    "value",
    [
        12345678,
        1.5,
        None,
        ["s3cret"],
        "s3cret\0",
        "s3cret\udc80",
        pytest.param("s3cret" * 30_000, id="too long"),
    ],
)
def test_values_that_no_process_can_get_are_refused_and_never_shown(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_variable("TOKEN", value)
    assert "s3cret" not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_a_variable_at_the_limit_reaches_a_real_process_and_a_longer_one_is_refused() -> None:
    longest = "x" * (128 * 1024 - len("A=") - 1)
    subprocess.run(["true"], env={"A": check_variable("A", longest)}, check=True)
    with pytest.raises(UsageError, match="KiB"):
        check_variable("A", longest + "x")


# Secrets

TOKEN = Secret(name="HF_TOKEN", from_env="MY_TOKEN", where="trial.yaml:3")


def test_a_secret_names_the_variable_that_has_its_value() -> None:
    given = {"secret": True, "from_env": "MY_TOKEN"}
    assert parse_variable("HF_TOKEN", given, where="trial.yaml:3") == TOKEN
    assert parse_variable("HF_TOKEN", "plain", where="trial.yaml:3") == "plain"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({}, "secret: true, from_env: NAME"),
        ({"secret": True}, "secret: true, from_env: NAME"),
        ({"from_env": "MY_TOKEN"}, "secret: true, from_env: NAME"),
        ({"secret": False, "from_env": "MY_TOKEN"}, "secret: true, from_env: NAME"),
        ({"secret": "true", "from_env": "MY_TOKEN"}, "secret: true, from_env: NAME"),
        ({"secret": "hf_s3cret_value", "from_env": "MY_TOKEN"}, "secret: true, from_env: NAME"),
        ({"secret": True, "from_env": "hf_s3cret_value"}, "never the value itself"),
        ({"secret": True, "from_env": "MY-TOKEN"}, "variable's name"),
        ({"secret": True, "form_env": "MY_TOKEN"}, "did you mean 'from_env'"),
    ],
)
def test_another_form_of_secret_is_refused_and_never_shown(given: object, hint: str) -> None:
    with pytest.raises(UsageError, match=hint) as caught:
        parse_variable("HF_TOKEN", given, where="")
    assert "s3cret" not in str(caught.value)


def test_a_reserved_variable_is_no_secret_either() -> None:
    with pytest.raises(UsageError, match="reserved"):
        parse_variable("ORCH_RUN_ID", {"secret": True, "from_env": "MY_TOKEN"}, where="")


@pytest.mark.parametrize("value", ["12345678", "pass word ü", "\\\"'{} ab", "x" * 16384])
def test_a_secret_s_value_is_read_from_the_environment(value: str) -> None:
    assert TOKEN.read({"MY_TOKEN": value, "HF_TOKEN": "another"}) == value


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"HF_TOKEN": "hf_s3cret"}, "is not in this environment"),
        ({"MY_TOKEN": ""}, "has 0 bytes"),
        ({"MY_TOKEN": "s3cret!"}, "has 7 bytes"),
        ({"MY_TOKEN": "s3cret" * 3000}, "has 18000 bytes"),
        ({"MY_TOKEN": "hf_s3cret\n"}, "line break"),
        ({"MY_TOKEN": "s3cret\ts3cret"}, "control character"),
        ({"MY_TOKEN": "s3cret\udcffs3cret"}, "not UTF-8"),
    ],
)
def test_a_secret_that_cannot_be_had_or_masked_says_which_and_where_and_never_what(
    environ: dict[str, str], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        TOKEN.read(environ)
    assert str(caught.value).startswith("trial.yaml:3: env.HF_TOKEN: the secret MY_TOKEN ")
    assert why in str(caught.value)
    assert "s3cret" not in str(caught.value)


# Devices and durations

GPU = "GPU-5a3c1f0e-1111-2222-3333-444455556666"


def test_devices_keep_their_order() -> None:
    assert parse_devices("none") == ()
    assert parse_devices([5, "0", GPU]) == ("5", "0", GPU)


@pytest.mark.parametrize(
    "device", [-1, 1.0, True, None, "", "05", "-1", "GPU-", "GPU-5a3c", GPU + "\n", f" {GPU}"]
)
def test_what_names_no_device_is_refused(device: object) -> None:
    with pytest.raises(UsageError, match="no device"):
        parse_device(device)


@pytest.mark.parametrize("device", ["cuda:5", "/dev/nvidia5"])
def test_a_name_from_inside_a_process_is_refused_with_the_index(device: str) -> None:
    with pytest.raises(UsageError, match="write 5"):
        parse_device(device)


@pytest.mark.parametrize("devices", [5, "5", [], None, "all", True])
def test_devices_must_be_none_a_list_or_a_mapping(devices: object) -> None:
    with pytest.raises(UsageError, match="list of indexes"):
        parse_devices(devices)


def test_a_device_listed_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="1 is listed twice"):
        parse_devices([1, "1"])


@pytest.mark.parametrize("device", [GPU.replace("GPU", "MIG"), f"MIG-{GPU}/7/0"])
def test_a_part_of_a_card_is_chosen_by_its_uuid(device: str) -> None:
    assert parse_device(device) == device


@pytest.mark.parametrize(
    ("value", "count", "text"),
    [
        ({"count": 2}, CardCount(count=2), "any 2"),
        (
            {"count": 1, "free_memory": "90GiB"},
            CardCount(count=1, free_bytes=90 * 1024**3),
            "any 1 with 90 GiB free",
        ),
    ],
)
def test_a_number_of_cards_stands_in_a_job_and_reads_as_what_was_asked(
    value: object, count: CardCount, text: str
) -> None:
    assert parse_devices(value) == count
    assert devices_text(devices_json(count)) == text


def test_devices_of_a_job_that_others_wrote_are_text_all_the_same() -> None:
    assert [devices_text(stated) for stated in (None, [], ["0", 1], {"count": None}, 7)] == [
        "none",
        "none",
        "0, 1",
        "any None",
        "none",
    ]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("10m", 600.0),
        ("1.5h", 5400.0),
        ("2 h", 7200.0),
        ("1d", 86400.0),
    ],
)
def test_durations_are_seconds(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.0,
        "0s",
        "",
        "s",
        "-5s",
        "1w",
        "10 minutes",
        "1e3",
        "90s\n",
        True,
        None,
        [90],
        float("nan"),
        float("inf"),
        pytest.param(10**400, id="huge"),
        "٣s",
    ],
)
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="no duration"):
        parse_duration(value)


@pytest.mark.parametrize(("value", "seconds"), [(0, 0.0), ("0s", 0.0), ("30s", 30.0), ("7d", 604800.0)])
def test_a_grace_may_be_nothing(value: object, seconds: float) -> None:
    assert parse_grace(value) == seconds


@pytest.mark.parametrize("value", [-1, False, "", None, "8d", [0]])
def test_what_is_no_grace_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"no duration|too long a grace"):
        parse_grace(value)


@pytest.mark.parametrize(
    ("value", "size_bytes"), [("16MiB", 2**24), ("2 GiB", 2**31), ("1.5KiB", 1536), ("1TiB", 2**40)]
)
def test_sizes_are_bytes(value: object, size_bytes: int) -> None:
    assert parse_size(value) == size_bytes


@pytest.mark.parametrize(
    "value", [16, "16", "16MB", "-1MiB", "1 000MiB", "1mib", "MiB", True, None, "1MiB\n"]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="no size"):
        parse_size(value)


@pytest.mark.parametrize("value", [1, 8, 64, "2"])
def test_a_number_of_processes_is_a_number_or_its_text(value: object) -> None:
    assert parse_processes(value) == int(str(value))


@pytest.mark.parametrize("value", [0, 65, -1, 1.0, True, None, "", "two", "0", "٣", [2]])
def test_what_is_no_number_of_processes_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="is no number of processes: use 1 to 64"):
        parse_processes(value)


def test_what_orch_tells_ranks_can_be_set_where_there_are_none() -> None:
    check_free_of_ranks(["RANK", "MASTER_PORT"], 1)
    check_free_of_ranks(["OMP_NUM_THREADS", "RANK_OF_MINE"], 2)
    with pytest.raises(UsageError, match="MASTER_PORT is set by orch for each of 2 processes"):
        check_free_of_ranks(["A", "MASTER_PORT"], 2)


def test_a_memory_limit_is_more_than_nothing() -> None:
    assert parse_memory("94.97GiB") == int(94.97 * 1024**3)
    with pytest.raises(UsageError, match="more than 0"):
        parse_memory("0GiB")
    with pytest.raises(UsageError, match="is no size"):
        parse_memory(96)
