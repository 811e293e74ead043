"""What could be changed so that a run needs less: one thing at a time, none of it already so.

Loads without torch.
"""

from dataclasses import dataclass
from typing import Any

from dflash.config import RECOMPUTE_POLICIES
from dflash.memory.allocator_settings import parse_alloc_conf, with_expandable_segments
from dflash.memory.entries import Entry

LEAST_CHUNK_ROWS = 256  # below, the loss's products are too small for the card


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """Parameters to set, or another allocator setting; `alloc_conf` None leaves that as it is."""

    label: str
    set: dict[str, object]
    alloc_conf: str | None = None


def variations(entry: Entry, params: Any, alloc_conf: str) -> list[Variation]:
    """Return what could help, other parameters only where the program is about one configuration."""
    found = []
    if not parse_alloc_conf(alloc_conf).expandable_segments:
        changed = with_expandable_segments(alloc_conf)
        found.append(Variation(label="expandable_segments:True", set={}, alloc_conf=changed))
    for values in _parameters(params) if entry.brief else ():
        label = ", ".join(f"{name}={_shown(value)}" for name, value in values.items())
        found.append(Variation(label=label, set=values))
    return found


def _parameters(params: Any) -> list[dict[str, object]]:
    found = _attention(params)
    policy = getattr(params, "recompute", RECOMPUTE_POLICIES[-1])
    found += [{"recompute": more} for more in RECOMPUTE_POLICIES[RECOMPUTE_POLICIES.index(policy) + 1 :]]
    if params.loss_chunk_rows > LEAST_CHUNK_ROWS:
        found.append({"loss_chunk_rows": max(LEAST_CHUNK_ROWS, params.loss_chunk_rows // 4)})
    fewer = [params.max_anchors // parts for parts in (2, 4)]
    return found + [{"max_anchors": count} for count in fewer if count]


def _attention(params: Any) -> list[dict[str, object]]:
    """Return the ways to attend without all scores, and smaller chunks where they are what is held."""
    is_flex = params.attention in ("auto", "flex")
    if is_flex and params.compile:
        return []
    flex = {} if is_flex else {"attention": "flex"}
    found: list[dict[str, object]] = [{**flex, **({} if params.compile else {"compile": True})}]
    if params.attention != "sdpa_chunked":
        found.append({"attention": "sdpa_chunked"})
    if params.attention == "sdpa_math" and params.chunk_blocks > 1:
        found.append({"chunk_blocks": max(1, params.chunk_blocks // 4)})
    return found


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
