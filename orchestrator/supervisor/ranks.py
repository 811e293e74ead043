"""The processes of one run as ranks: their names, and the variables that torchrun gives to its own.

A run of one process has none of this: its process is ``main`` and finds no rank in its environment.
"""

from typing import TYPE_CHECKING, Any, Dict, List, Mapping

if TYPE_CHECKING:
    import socket

MAIN = "main"
MOST_RANKS = 64
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",  # by which torch.distributed and Lightning tell that somebody started the ranks
)


def count_of(job: Mapping[str, Any]) -> int:
    """Returns how many processes a job asks for.

    Raises:
        ValueError: not a number from 1 to `MOST_RANKS`, or more than one for a command.
    """
    count = job.get("processes", 1)
    if type(count) is not int or not 1 <= count <= MOST_RANKS:
        raise ValueError("a job has 1 to %d processes, this one %r" % (MOST_RANKS, count))
    if count > 1 and job.get("command"):
        raise ValueError("a command is one process, this job asks for %d" % count)
    return count


def names(count: int) -> List[str]:
    """Returns what stands for each process in its records."""
    return [MAIN] if count == 1 else ["rank%d" % rank for rank in range(count)]


def variables(rank: int, count: int, port: int, run_id: str) -> Dict[str, str]:
    """Returns the variables of one rank; all run on this host, in one group and one role."""
    of_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    of_all = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**of_rank, **of_all, **meeting, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": run_id}


def hold_port() -> "socket.socket":
    """Returns a socket bound to a free port, which rank 0 can listen on while the socket is open.

    It does not listen itself. While it is bound, the kernel gives its port to nobody who asks for any free
    one or connects somewhere; who names the port and sets SO_REUSEADDR, as torch's store does, may have it.
    """
    import socket  # noqa: PLC0415  (only a run with ranks pays for it)

    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
