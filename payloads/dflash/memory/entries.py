"""Which programs of the payload can be estimated, with what parameters, and what of their work is enough.

Loads without torch; the work itself does not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dflash.probes import anchors, backends, bench, dispatch, inference, oom
from dflash.values import build, unknown

Params = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One program; `work` None where there is nothing to estimate, and `why_not` says so.

    `few` are parameters that a simulated run does without, because they change nothing that is allocated.
    `brief` does what is enough to compare configurations; None where the program compares some itself.
    """

    module: str
    params: type[Params]
    work: Callable[[Params], object] | None
    few: Mapping[str, object] = field(default_factory=dict)
    brief: Callable[[Params], object] | None = None
    why_not: str | None = None

    def build(self, values: Mapping[str, object]) -> Params:
        """Return the program's checked parameters.

        Raises:
            ValueError: a name is unknown, or a value is refused.
        """
        return build(self.params, values, what="parameter")

    def run(self, params: Params, *, is_brief: bool = False) -> None:
        """Do the work, without what allocates nothing."""
        work = self.brief if is_brief else self.work
        assert work is not None
        work(replace(params, **self.few))


def find_entry(module: str) -> Entry:
    """Return the entry of a module's name.

    Raises:
        ValueError: there is none.
    """
    if module not in ENTRIES:
        raise ValueError(unknown("entry", module, ENTRIES))
    return ENTRIES[module]


ENTRIES = {
    entry.module: entry
    for entry in (
        Entry(
            module="dflash.probes.anchors",
            params=anchors.AnchorSweepParams,
            work=anchors.work,
        ),
        Entry(
            module="dflash.probes.backends",
            params=backends.BackendMatrixParams,
            work=backends.work,
        ),
        Entry(
            module="dflash.probes.bench",
            params=bench.BenchParams,
            work=bench.work,
            few={"profile": False},
        ),
        Entry(
            module="dflash.probes.dispatch",
            params=dispatch.DispatchParams,
            work=None,
            why_not="dflash.probes.dispatch asks torch with small tensors: there is nothing to estimate",
        ),
        Entry(
            module="dflash.probes.inference",
            params=inference.InferenceProbeParams,
            work=inference.work,
            brief=partial(inference.work, is_brief=True),
        ),
        Entry(
            module="dflash.probes.oom",
            params=oom.OomProbeParams,
            work=oom.work,
            brief=partial(oom.work, is_brief=True),
        ),
    )
}
