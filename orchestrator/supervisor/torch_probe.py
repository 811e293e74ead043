"""What torch is to this interpreter: its build, the cards it sees, the allocator settings it takes.

``python torch_probe.py SETTINGS`` imports torch, so it runs in a process of its own, in the environment that
a payload gets; SETTINGS is a JSON mapping of allocator keys to harmless values. Each finding is a line of
JSON after `MARK` as soon as it is known: what was found before a crash is not lost, and what torch itself
prints is none of it. Allocates nothing on any card.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this file's folder is not torch's business

import importlib
import json
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

MARK = "\x00orch-torch "
NO_SUCH_KEY = "orch_no_such_key"  # a torch that takes this one checks none
MAX_CHARACTERS = 2000


def found_in(text: str) -> Dict[str, Any]:
    """Returns all findings in what a probe wrote."""
    found: Dict[str, Any] = {}
    for line in text.split("\n"):
        if line.startswith(MARK):
            found.update(json.loads(line[len(MARK) :]))
    return found


def main(settings: Dict[str, str]) -> None:
    """Says what there is to say of torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        _say(missing=error.name)
        return
    except Exception as error:  # noqa: BLE001  (a broken install ends in any way)
        _say(broken=_words(error))
        return
    _say(version=str(torch.__version__), cuda=torch.version.cuda)
    if torch.version.cuda is not None:
        _say(driver_api=_driver_api())
        _say(why_not=_why_not(torch))
        _say(arches=list(torch.cuda.get_arch_list()), devices=_devices(torch))
    _say(allocator=_allocator(torch, settings))


def _driver_api() -> Optional[int]:
    """Returns the newest CUDA of the driver, 12090 for 12.9, as the library says that torch will load."""
    try:
        import ctypes  # noqa: PLC0415  (a stripped Python may lack it)

        found = ctypes.c_int(0)
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (ImportError, OSError, AttributeError):
        return None
    return found.value if status == 0 else None


def _why_not(torch: Any) -> Optional[str]:
    """Returns why CUDA cannot be used, in torch's words; None when it can."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            is_available = torch.cuda.is_available()
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001
            said = [str(warning.message) for warning in warned]
            return " / ".join([*said, _words(error)])[:MAX_CHARACTERS]
    if is_available and torch.cuda.device_count():
        return None
    return " / ".join(str(warning.message) for warning in warned)[:MAX_CHARACTERS] or "it finds no card"


def _devices(torch: Any) -> List[Dict[str, Any]]:
    if not torch.cuda.is_initialized():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)  # torch before 2.4 tells none
        found.append(
            {
                "index": index,
                "name": properties.name,
                "uuid": None if uuid is None else "GPU-" + str(uuid).replace("GPU-", ""),
                "total_bytes": properties.total_memory,
                "arch": "sm_%d%d" % (properties.major, properties.minor),
            }
        )
    return found


def _allocator(torch: Any, settings: Dict[str, str]) -> Optional[Dict[str, Optional[str]]]:
    """Returns for each key None, or why it is refused; None where this torch refuses nothing."""
    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(  # noqa: SLF001
        torch._C,  # noqa: SLF001
        "_cuda_cudaCachingAllocator_set_allocator_settings",
        None,
    )
    if put is None or _refusal(put, NO_SUCH_KEY + ":1") is None:
        return None
    return {key: _refusal(put, "%s:%s" % (key, value)) for key, value in settings.items()}


def _refusal(put: Callable[[str], object], setting: str) -> Optional[str]:
    try:
        put(setting)
    except Exception as error:  # noqa: BLE001
        return _words(error)
    return None


def _words(error: BaseException) -> str:
    """Returns an exception's first line."""
    lines = str(error).strip().split("\n")
    return ("%s: %s" % (type(error).__name__, lines[0]))[:MAX_CHARACTERS]


def _say(**found: Any) -> None:
    sys.stdout.write("\n" + MARK + json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
