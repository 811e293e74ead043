"""What every transport promises, shown on each: a child process here, a program behind a real sshd, one in a
real container, and one in a container whose node is behind a real sshd.
"""

import getpass
import hashlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import paramiko
import pytest

from orchestrator.errors import (
    AuthenticationFailed,
    HostKeyChanged,
    HostUnfit,
    OrchError,
    Unreachable,
    UsageError,
)
from orchestrator.inventory import Host
from orchestrator.transports import Channel, Transport, connect, ssh_hop
from orchestrator.transports import local as local_module
from orchestrator.transports import ssh as ssh_module
from orchestrator.transports.base import STDERR_TAIL_BYTES
from orchestrator.transports.ssh import SshChannel, SshTransport
from orchestrator.transports.ssh_errors import FOREIGN_ERRORS, translate
from orchestrator.transports.ssh_hop import SILENCE_LIMIT_S
from tests.lxc import VMID
from tests.sshd import Sshd

StartSshd = Callable[..., Sshd]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

PATIENCE_S = 30.0
MIB = 1024 * 1024
LOCAL = Host(name="here", transport="local", address="here", python=sys.executable)


@pytest.fixture(params=["local", "ssh", "container", "container behind ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with connect(_host(request, request.param)) as opened:
        yield opened


def _host(request: pytest.FixtureRequest, kind: str) -> Host:
    if kind == "local":
        return LOCAL
    if kind == "ssh":
        return request.getfixturevalue("sshd").inventory_host()  # type: ignore[no-any-return]  # by its name
    request.getfixturevalue("container")
    node = LOCAL if kind == "container" else request.getfixturevalue("node_sshd").inventory_host()
    return Host(name="inside", transport="proxmox", address="node", node=node, vmid=VMID)


# Every transport


def test_eight_mebibytes_come_back_unaltered(transport: Transport) -> None:
    data = random.Random(1).randbytes(8 * MIB)
    channel = transport.open(["cat"])

    def send() -> None:
        channel.send(data)
        channel.finish_input()

    sender = threading.Thread(target=send)
    sender.start()
    received = receive_all(channel)
    sender.join()
    assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
    assert channel.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    "word",
    [
        "",
        " ",
        "two  words ",
        "it's",
        '"quoted"',
        "$(id) `id` $HOME ${HOME} ~ * ? [a-z] {a,b}",
        "a;b && c | d > e < f & # g !h",
        "line\nline\r\ttab",
        "back\\slash \\\\ \\n end\\",
        "-rf",
        "--",
        "déjà vu 東京 🙂",
        "\u202eright to left",
        pytest.param("x" * 50_000, id="long"),
    ],
)
def test_a_word_arrives_exactly_as_given(transport: Transport, word: str) -> None:
    program = "import os, sys; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    _, out, _ = run(transport, [sys.executable, "-I", "-c", program, word, "last", word])
    assert out.split(b"\0") == [word.encode(), b"last", word.encode()]


@pytest.mark.parametrize("status", [0, 1, 3, 127, 255])
def test_the_exit_status_is_the_programs(transport: Transport, status: int) -> None:
    assert run(transport, ["sh", "-c", f"exit {status}"])[0] == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV])
def test_a_program_ended_by_a_signal_says_which(transport: Transport, number: signal.Signals) -> None:
    program = (
        "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0));"
        # As nohup leaves it, one of them may be ignored here, and so in the program.
        f"{int(number)} == signal.SIGKILL or signal.signal({int(number)}, signal.SIG_DFL);"
        f"os.kill(os.getpid(), {int(number)})"
    )
    status = 128 + number if transport.host.transport == "proxmox" else -number  # as lxc-attach tells it
    assert run(transport, [sys.executable, "-I", "-c", program])[0] == status


def test_the_program_starts_in_the_users_home_without_a_terminal(transport: Transport) -> None:
    program = "import os; print(os.getcwd(), os.isatty(0), os.isatty(1), os.isatty(2))"
    homes = {
        "local": Path.home(),
        "ssh": Path(f"~{getpass.getuser()}").expanduser(),
        "proxmox": Path("/root"),
    }
    home = homes[transport.host.transport]
    _, out, _ = run(transport, [sys.executable, "-I", "-c", program])
    assert out.decode() == f"{home} False False False\n"


def test_output_ends_once_and_for_all(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "echo done"])
    assert receive_all(channel) == b"done\n"
    assert channel.recv(10, PATIENCE_S) == b""
    assert channel.recv(10, PATIENCE_S) == b""


def test_recv_returns_no_more_than_asked_for(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "echo 0123456789"])
    pieces = iter(lambda: channel.recv(4, PATIENCE_S), b"")
    assert [len(piece) <= 4 for piece in pieces].count(False) == 0


def test_silence_is_a_timeout_and_loses_nothing(transport: Transport) -> None:
    channel = transport.open(["cat"])
    for timeout_s in (0, 0.01):
        with pytest.raises(TimeoutError):
            channel.recv(10, timeout_s)
    with pytest.raises(TimeoutError):
        channel.wait(0.01)
    channel.send(b"still there")
    channel.finish_input()
    assert receive_all(channel) == b"still there"
    assert channel.wait(PATIENCE_S) == 0


def test_impatient_receiving_does_not_disturb_a_sender_that_waits(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "sleep 0.2; cat | wc -c"])

    def send() -> None:
        channel.send(b"x" * 8 * MIB)
        channel.finish_input()

    sender = threading.Thread(target=send)
    sender.start()
    received = b""
    while sender.is_alive():
        with suppress(TimeoutError):
            received += channel.recv(100, 0.01)
    assert (received + receive_all(channel)).strip() == str(8 * MIB).encode()


def test_the_end_of_input_reaches_a_program_that_goes_on_writing(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "cat >/dev/null; echo after"])
    channel.send(b"x" * MIB)
    channel.finish_input()
    channel.finish_input()
    assert receive_all(channel) == b"after\n"


def test_a_flood_on_stderr_does_not_hold_stdout_up_and_its_end_is_kept(transport: Transport) -> None:
    program = (
        "import sys\n"
        "for n in range(40):\n"
        "    sys.stderr.write('e' * (1 << 20)); sys.stderr.flush()\n"
        "    sys.stdout.write('o' * 1000); sys.stdout.flush()\n"
        "sys.stderr.write('the last words')\n"
    )
    status, out, err = run(transport, [sys.executable, "-I", "-c", program])
    assert (status, len(out), len(err)) == (0, 40_000, STDERR_TAIL_BYTES)
    assert err.endswith(b"eee" + b"the last words")


def test_stderr_is_complete_when_stdout_has_ended(transport: Transport) -> None:
    for _ in range(20):
        assert run(transport, ["sh", "-c", "echo why >&2; exit 4"]) == (4, b"", b"why\n")


def test_two_channels_do_not_mix(transport: Transport) -> None:
    first, second = transport.open(["cat"]), transport.open(["cat"])
    for _ in range(50):
        first.send(b"first")
        second.send(b"second!")
    first.finish_input()
    second.finish_input()
    assert receive_all(second) == b"second!" * 50
    assert receive_all(first) == b"first" * 50


def test_closing_while_data_flows_both_ways_neither_hangs_nor_fails(transport: Transport) -> None:
    channel = transport.open([sys.executable, "-I", "-c", "while True: print('x' * 60000)"])
    errors: list[BaseException] = []

    def send_for_ever() -> None:
        try:
            while True:
                channel.send(b"y" * MIB)
        except BaseException as error:  # noqa: BLE001  # looked at below
            errors.append(error)

    sender = threading.Thread(target=send_for_ever)
    sender.start()
    assert channel.recv(MIB, PATIENCE_S)
    channel.close()
    channel.close()
    sender.join(PATIENCE_S)
    assert [type(error) for error in errors] == [Unreachable]
    assert run(transport, ["echo", "the transport still works"])[1] == b"the transport still works\n"


def test_sending_to_a_program_that_ended_is_an_error_and_its_words_are_kept(transport: Transport) -> None:
    channel = transport.open(["sh", "-c", "echo no such thing >&2; exit 9"])
    assert channel.wait(PATIENCE_S) == 9
    until(lambda: is_broken(channel))
    with pytest.raises(Unreachable, match="takes no more input"):
        channel.send(b"z")
    assert receive_all(channel) == b""
    assert channel.stderr() == b"no such thing\n"


def test_a_closed_channel_is_not_mistaken_for_the_end_of_output(transport: Transport) -> None:
    channel = transport.open(["cat"])
    channel.close()
    with pytest.raises(Unreachable, match="closed on this side"):
        channel.recv(1, PATIENCE_S)
    with pytest.raises(Unreachable, match="closed on this side"):
        channel.send(b"x")


def test_closing_the_transport_closes_its_channels_and_may_be_repeated(transport: Transport) -> None:
    channel = transport.open(["cat"])
    transport.close()
    transport.close()
    channel.close()
    with pytest.raises(Unreachable):
        channel.recv(1, PATIENCE_S)


# Local alone


def test_a_transport_that_was_closed_opens_nothing_more(transport: Transport) -> None:
    transport.close()
    with pytest.raises(Unreachable):
        transport.open(["true"])


def test_a_local_interpreter_that_is_missing_names_the_setting(tmp_path: Path) -> None:
    not_executable = tmp_path / "python"
    not_executable.write_text("")
    with connect(LOCAL) as local:
        for program in (tmp_path / "nowhere", not_executable):
            with pytest.raises(HostUnfit, match=r"set 'python:' in inventory\.yaml") as caught:
                local.open([str(program)])
            assert str(program) in str(caught.value)


def test_a_local_program_is_out_of_reach_of_the_terminals_interrupt() -> None:
    with connect(LOCAL) as local:
        _, out, _ = run(local, [sys.executable, "-I", "-c", "import os; print(os.getsid(0) == os.getpid())"])
    assert out == b"True\n"


def test_a_local_program_that_ignores_everything_is_gone_after_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_module, "GRACE_S", 0.1)
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os.write(1, b'%d' % os.getpid()); time.sleep(600)"
    )
    with connect(LOCAL) as local:
        pid = int(local.open([sys.executable, "-I", "-c", program]).recv(10, PATIENCE_S))
    assert not Path(f"/proc/{pid}").exists()


def test_a_grandchild_that_holds_the_pipes_does_not_keep_close_waiting() -> None:
    with connect(LOCAL) as local:
        channel = local.open(["sh", "-c", "sleep 600 & echo $!"])
        pid = int(channel.recv(100, PATIENCE_S))
        assert channel.wait(PATIENCE_S) == 0
    os.kill(pid, signal.SIGKILL)


# ssh alone


def test_a_killed_server_process_is_a_broken_connection_and_not_an_end(sshd: Sshd) -> None:
    with connect(sshd.inventory_host()) as transport:
        channel = transport.open(["sh", "-c", "echo before; exec cat"])
        assert channel.recv(100, PATIENCE_S) == b"before\n"
        sshd.kill_sessions()
        for act in (lambda: channel.recv(1, PATIENCE_S), lambda: channel.wait(PATIENCE_S)):
            with pytest.raises(Unreachable, match="broke"):
                act()
        with pytest.raises(Unreachable, match="broke"):
            channel.send(b"x")
        with pytest.raises(Unreachable):
            transport.open(["true"])


def test_output_that_arrived_before_the_connection_broke_can_be_read(sshd: Sshd) -> None:
    with connect(sshd.inventory_host()) as transport:
        channel = transport.open(["sh", "-c", "head -c 1000000 /dev/zero; echo end >&2; exec sleep 600"])
        until(lambda: channel.stderr() == b"end\n")
        sshd.kill_sessions()
        received = 0
        while received < 1_000_000:
            received += len(channel.recv(1000, PATIENCE_S))
        with pytest.raises(Unreachable):
            channel.recv(1000, PATIENCE_S)


def test_an_exit_status_does_not_turn_a_broken_connection_into_an_end(sshd: Sshd) -> None:
    with connect(sshd.inventory_host()) as transport:
        channel = transport.open(["sh", "-c", "sleep 600 & echo $!"])
        pid = int(channel.recv(100, PATIENCE_S))
        assert channel.wait(PATIENCE_S) == 0
        sshd.kill_sessions()
        with pytest.raises(Unreachable, match="broke"):
            channel.recv(1, PATIENCE_S)
    os.kill(pid, signal.SIGKILL)


def test_small_messages_are_sent_at_once_and_a_dead_peer_is_noticed(sshd: Sshd) -> None:
    with SshTransport(sshd.inventory_host(), connect_timeout_s=PATIENCE_S) as transport:
        sock = transport._route[0].transport.sock
        assert isinstance(sock, socket.socket)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_LIMIT_S * 1000


def test_the_threads_of_a_connection_are_gone_when_close_returns(sshd: Sshd) -> None:
    for _ in range(20):
        with connect(sshd.inventory_host()) as transport:
            transport.open(["cat"])
        kinds = [type(thread) for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert set(kinds) <= {threading.Timer}, "a cancelled timer may still be on its way out"


def test_a_tunnel_that_cannot_even_be_closed_leaves_no_traceback_on_the_terminal() -> None:
    class DeadTunnel:
        def settimeout(self, timeout_s: float) -> None:
            del timeout_s

        def send(self, data: bytes) -> int:
            return len(data)

        def recv(self, size: int) -> bytes:
            del size
            return b""

        def close(self) -> None:
            raise EOFError

    thread = ssh_hop._Transport(DeadTunnel())  # type: ignore[arg-type]  # as much of a socket as is used
    with pytest.raises(paramiko.SSHException):
        thread.start_client(timeout=PATIENCE_S)
    thread.join()  # pytest turns an exception in a thread into a failure


def test_a_connection_outlives_the_restart_of_the_listening_server(sshd: Sshd) -> None:
    with connect(sshd.inventory_host()) as transport:
        sshd.restart()
        assert run(transport, ["echo", "alive"])[1] == b"alive\n"


def test_a_server_that_answers_no_more_stops_neither_open_nor_close(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_module, "OPEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(ssh_module, "CLOSE_TIMEOUT_S", 0.3)
    with connect(sshd.inventory_host()) as transport:
        channels = [transport.open(["cat"]) for _ in range(9)]
        sshd.pause_sessions()
        stuffers = [threading.Thread(target=is_broken, args=[channel, 2 * MIB]) for channel in channels]
        for stuffer in stuffers:
            stuffer.start()
        until(lambda: is_stuck(channels))
        closer = threading.Thread(target=channels[0].close)
        closer.start()
        closer.join(SILENCE_LIMIT_S / 3)
        assert not closer.is_alive(), "close waits for the kernel to give the connection up"
        with pytest.raises(Unreachable):
            transport.open(["true"])
    for stuffer in stuffers:
        stuffer.join()


def test_a_server_that_stops_between_channel_and_command_does_not_stop_open(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = SshTransport._execute

    def pause_and_execute(self: SshTransport, raw: paramiko.Channel, command: bytes) -> None:
        sshd.pause_sessions()
        execute(self, raw, command)

    monkeypatch.setattr(ssh_module, "OPEN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(SshTransport, "_execute", pause_and_execute)
    with connect(sshd.inventory_host()) as transport, pytest.raises(Unreachable):
        transport.open(["true"])


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_quoting_holds_for_the_log_in_shells_of_linux(start_sshd: StartSshd, shell: str) -> None:
    server = start_sshd(options={"ForceCommand": f'{shell} -c "$SSH_ORIGINAL_COMMAND"'})
    words = ["it's", "a\\\\b\\", "line\nline", "$(id)", '"', "!!", "", "~", "é"]
    program = "import os, sys; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    with connect(server.inventory_host()) as transport:
        _, out, _ = run(transport, [sys.executable, "-I", "-c", program, *words])
    assert out.decode().split("\0") == words


def test_a_banner_and_noisy_start_up_files_break_nothing(start_sshd: StartSshd, tmp_path: Path) -> None:
    banner = tmp_path / "banner"
    banner.write_text("UNAUTHORISED USE\n" * 100)
    server = start_sshd(options={"Banner": f'"{banner}"', "PrintMotd": "yes"})
    (server.home / ".bashrc").write_text("echo noise; echo noise >&2\n")
    with connect(server.inventory_host()) as transport:
        status, out, err = run(transport, ["echo", "data"])
    assert status == 0
    assert out == b"noise\ndata\n", "noise stays in front; the caller's protocol skips it"
    assert err == b"noise\n"


def test_ssh_says_nothing_on_the_terminal(sshd: Sshd) -> None:
    program = (
        "import sys\n"
        "from orchestrator.errors import OrchError\n"
        "from orchestrator.inventory import Host\n"
        "from orchestrator.transports import connect\n"
        "for port in map(int, sys.argv[2:]):\n"
        "    host = Host(name='b', transport='ssh', address='127.0.0.1', port=port, host_key=sys.argv[1])\n"
        "    try: connect(host, connect_timeout_s=0.5)\n"
        "    except OrchError: pass\n"
    )
    with mute_server(b"not ssh at all\r\n") as mute:
        done = subprocess.run(
            [sys.executable, "-c", program, sshd.host_key(), str(sshd.port), str(mute)],
            check=False,
            capture_output=True,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert logging.getLogger("paramiko").propagate, "an application may still log it"


def test_a_server_that_drops_connections_before_the_banner_is_tried_again(start_sshd: StartSshd) -> None:
    server = start_sshd(options={"MaxStartups": "1:100:1"})
    with socket.create_connection((server.address, server.port)) as squatter:
        squatter.recv(1)  # holds the one place for log-ins
        release = threading.Timer(1.0, squatter.shutdown, [socket.SHUT_RDWR])
        release.start()
        with connect(server.inventory_host()) as transport:
            assert run(transport, ["echo", "in"])[1] == b"in\n"
        release.join()
    assert "MaxStartups" in server.log.read_text(), "it was refused at first"


def test_trying_again_ends_with_the_time_to_connect(start_sshd: StartSshd) -> None:
    server = start_sshd(options={"MaxStartups": "1:100:1"})
    with socket.create_connection((server.address, server.port)) as squatter:
        squatter.recv(1)
        with pytest.raises(Unreachable, match="MaxStartups"):
            connect(server.inventory_host(), connect_timeout_s=0.5)


def test_a_server_that_says_nothing_costs_no_more_than_the_time_to_connect() -> None:
    host = Host(name="box", transport="ssh", address="127.0.0.1", host_key="ssh-ed25519 AAAA")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_s = time.monotonic()
        with pytest.raises(Unreachable, match="no answer"):
            connect(with_port(host, silent.getsockname()[1]), connect_timeout_s=0.3)
    assert time.monotonic() - start_s < PATIENCE_S


def test_refused_unresolvable_and_foreign_servers_are_unreachable() -> None:
    host = Host(name="box", transport="ssh", address="127.0.0.1", host_key="ssh-ed25519 AAAA")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Unreachable, match=f"127.0.0.1 port {port}: Connection refused"):
        connect(with_port(host, port))
    with pytest.raises(Unreachable, match=r"nowhere\.invalid"):
        connect(Host(name="box", transport="ssh", address="nowhere.invalid", host_key="ssh-ed25519 AAAA"))
    with mute_server(b"HTTP/1.1 400 \x1b[31mBad\r\n\r\n") as port, pytest.raises(Unreachable) as caught:
        connect(with_port(host, port), connect_timeout_s=0.5)
    assert "\x1b" not in str(caught.value)
    with mute_server(b"SSH-2.0-and-no-more\r\n") as port, pytest.raises(Unreachable):
        connect(with_port(host, port))


def every_ssh_exception() -> Iterator[type[paramiko.SSHException]]:
    pending = [paramiko.SSHException]
    while pending:
        kind = pending.pop()
        yield kind
        pending.extend(kind.__subclasses__())


ARGUMENTS: dict[str, tuple[object, ...]] = {
    "BadAuthenticationType": ("no", ["password"]),
    "PartialAuthentication": (["password"],),
    "ChannelException": (2, "Connect failed"),
    "ProxyCommandFailure": ("nc box 22", "broken"),
    "AuthFailure": ([],),
}
CLASSES: dict[str, type[OrchError]] = {
    "AuthenticationException": AuthenticationFailed,
    "PasswordRequiredException": AuthenticationFailed,
    "BadAuthenticationType": AuthenticationFailed,
    "PartialAuthentication": AuthenticationFailed,
    "UnableToAuthenticate": AuthenticationFailed,
    "AuthFailure": AuthenticationFailed,
    "BadHostKeyException": HostKeyChanged,
    "ConfigParseError": UsageError,
    "CouldNotCanonicalize": UsageError,
    "IncompatiblePeer": HostUnfit,
    "MessageOrderError": HostUnfit,
}


@pytest.mark.parametrize("kind", every_ssh_exception(), ids=lambda kind: kind.__name__)
def test_every_exception_of_paramiko_has_a_word_of_ours(kind: type[paramiko.SSHException]) -> None:
    arguments = ARGUMENTS.get(kind.__name__, ("some words",))
    if kind is paramiko.BadHostKeyException:
        key = paramiko.RSAKey.generate(1024)
        arguments = ("box", key, key)
    error = translate(kind(*arguments), host="box", where="192.0.2.10 port 22")
    assert type(error) is CLASSES.get(kind.__name__, Unreachable)
    assert str(error).startswith("box: ")
    assert "\n" not in str(error)
    assert issubclass(kind, FOREIGN_ERRORS)


@pytest.mark.parametrize(
    "foreign",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError("timed out"),
        TimeoutError(),
        EOFError(),
        paramiko.ssh_exception.NoValidConnectionsError({("192.0.2.10", 22): OSError("no")}),
    ],
    ids=repr,
)
def test_every_failure_of_a_socket_is_unreachable(foreign: Exception) -> None:
    error = translate(foreign, host="box", where="192.0.2.10 port 22")
    assert type(error) is Unreachable
    assert isinstance(foreign, FOREIGN_ERRORS)
    assert not str(error).endswith(": ")


def test_a_channel_that_the_server_does_not_allow_makes_the_host_unfit() -> None:
    error = translate(paramiko.ChannelException(1, "prohibited"), host="box", where="here")
    assert type(error) is HostUnfit


def test_a_server_without_room_for_another_channel_is_an_error_of_ours(start_sshd: StartSshd) -> None:
    server = start_sshd(options={"MaxSessions": "1"})
    with connect(server.inventory_host()) as transport:
        transport.open(["cat"])
        with pytest.raises(OrchError):
            transport.open(["cat"])


def run(transport: Transport, argv: Sequence[str]) -> tuple[int, bytes, bytes]:
    channel = transport.open(argv)
    channel.finish_input()
    out = receive_all(channel)
    status = channel.wait(PATIENCE_S)
    return status, out, channel.stderr()


def receive_all(channel: Channel) -> bytes:
    return b"".join(iter(lambda: channel.recv(MIB, PATIENCE_S), b""))


def is_broken(channel: Channel, size_bytes: int = MIB) -> bool:
    try:
        channel.send(b"x" * size_bytes)
    except Unreachable:
        return True
    return False


def is_stuck(channels: Sequence[Channel]) -> bool:
    """True when the socket takes no more although a window is open: even a goodbye has to wait."""

    def windows() -> list[int]:
        return [channel._raw.out_window_size for channel in channels if isinstance(channel, SshChannel)]

    before = windows()
    time.sleep(0.2)
    return windows() == before and 0 < sum(before) < len(before) * 2 * MIB


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def with_port(host: Host, port: int) -> Host:
    return Host(name=host.name, transport="ssh", address=host.address, port=port, host_key=host.host_key)


class mute_server:  # noqa: N801  # used as a with-block
    """Says ``greeting`` to whoever connects, and closes."""

    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> int:
        self._thread.start()
        port: int = self._server.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            with client:
                client.sendall(self._greeting)
