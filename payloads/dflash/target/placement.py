"""Which module of a large model stands on which of several devices.

Layers keep their order, so that states cross from one device to the next once. The embedding stands on the
first device, final norm and head on the last, except a head that is the embedding: it stands with it. How
weights get there is others' business.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from dflash.target.parts import layers_of


def device_map(
    model: nn.Module, devices: Sequence[torch.device], *, room_bytes: Sequence[int]
) -> dict[str, torch.device]:
    """Return the device of each module by name, each device's share being as large as its share of the room.

    The model may be on "meta".

    Raises:
        ValueError: there are fewer layers than devices.
    """
    layers = layers_of(model)
    if len(layers) < len(devices):
        raise ValueError(f"{len(layers)} layers cannot be spread over {len(devices)} devices; name fewer")
    names = list(_cut(model, "", layers))
    sizes = _sizes(model, names)
    places = dict(zip(names, spread(list(sizes.values()), room_bytes), strict=True))
    seen_layers = False
    for name in names:
        module = model.get_submodule(name)
        is_layer = any(module is layer for layer in layers)
        seen_layers |= is_layer
        if not is_layer:
            places[name] = len(devices) - 1 if seen_layers and sizes[name] else 0
    return {name: devices[place] for name, place in places.items()}


def spread(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return for each of several things in a row the place whose part of the room its middle falls into."""
    total, everywhere = max(1, sum(sizes)), sum(room)
    ends = [sum(room[: place + 1]) / everywhere for place in range(len(room))]
    places, before = [], 0
    for size in sizes:
        middle = (before + size / 2) / total
        places.append(next((place for place, end in enumerate(ends) if middle < end), len(room) - 1))
        before += size
    return places


def _cut(module: nn.Module, prefix: str, layers: nn.ModuleList) -> Iterator[str]:
    """Yield the names of the layers and of the largest modules that hold none of them, in order."""
    for name, child in module.named_children():
        path = prefix + name
        if child is layers:
            yield from (f"{path}.{number}" for number in range(len(layers)))
        elif any(inner is layers for inner in child.modules()):
            yield from _cut(child, f"{path}.", layers)
        else:
            yield path


def _sizes(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return each module's bytes; a weight that two modules share counts where it comes first."""
    counted: set[int] = set()
    sizes = {}
    for name in names:
        own = {id(weight): weight for weight in model.get_submodule(name).parameters()}
        sizes[name] = sum(weight.nbytes for key, weight in own.items() if key not in counted)
        counted |= own.keys()
    return sizes
