"""The DFlash drafter: a small block-diffusion transformer that drafts for a large model (arXiv 2602.06036).

The package needs torch and the standard library, nothing else. `dflash.events`, the configuration and the
parameters of the probes load without torch, so a mistyped parameter is refused before the seconds that torch
takes.
"""

from typing import TYPE_CHECKING, Any

from dflash.config import DrafterConfig, create_drafter_config

if TYPE_CHECKING:
    from dflash.drafter import DFlashDrafter

__all__ = ["DFlashDrafter", "DrafterConfig", "create_drafter_config"]


def __getattr__(name: str) -> Any:
    if name == "DFlashDrafter":
        from dflash.drafter import DFlashDrafter  # noqa: PLC0415  imports torch

        return DFlashDrafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
