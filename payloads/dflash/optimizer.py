"""AdamW on float32 weights whatever the model computes in, with gradients clipped by their global norm.

A step of AdamW is about the learning rate, and a bfloat16 weight of 1.0 has no neighbour nearer than 0.004:
in pure bfloat16 most norms never move. So each parameter of a narrow type has a master in float32, which is
what is stepped, and the parameter is its rounding. Masters and both moments are made at once, 12 bytes a
parameter: what fits before the first step fits after it. While a parameter is stepped there is one float32
copy of its gradient.

Learning-rate schedules, accumulation and what is summed over ranks are others' business.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

NORM_FLOOR = 1e-6  # torch.nn.utils.clip_grad_norm_ adds as much before it divides


class MasterAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) by torch's fused kernel, in float32 or, for float64 parameters, in that.

    Parameters that need no gradient are left out; vectors (the norms' weights) do not decay. A state has
    "step", "exp_avg", "exp_avg_sq" and, where the parameter's type is narrow, "master".

    Raises:
        ValueError: there is no parameter to train, or a number is out of range.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}; both must be at least 0 and below 1")
        if not trained:
            raise ValueError("no parameter needs a gradient, so there is nothing to train")
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        defaults = {"lr": lr, "betas": betas, "eps": eps}
        super().__init__([group for group in groups if group["params"]], defaults)
        for parameter in self._parameters():
            self.state[parameter] = _initial_state(parameter)

    @torch.no_grad()
    def step(  # type: ignore[override]  # no closure: a step is one step
        self,
        max_norm: float,
        *,
        gradients: Mapping[nn.Parameter, Tensor] | None = None,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Step all parameters that have a gradient; return the gradients' norm before they were clipped.

        `gradients` are taken instead of the parameters' own, in any type; `divisor`, a scalar on the device,
        is what all of them are still to be divided by, before norm and clipping.

        The host does not wait: the norm stays on the device. When it is not finite, as with a divisor of 0,
        nothing changes, neither weights nor state. Gradients of parameters without a master are scaled in
        place.

        Raises:
            ValueError: `max_norm` is not greater than 0; infinity does not clip.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it must be greater than 0")
        taken = self._own_gradients() if gradients is None else gradients
        norm = _norm([taken[parameter] for parameter in self._parameters() if parameter in taken])
        if divisor is not None:
            norm = norm / divisor
        # The kernel divides gradients by the one and leaves everything as it is when the other is 1.
        shrinkage = ((norm + NORM_FLOOR) / max_norm).clamp(min=1.0)
        shrinkage = (shrinkage if divisor is None else shrinkage * divisor).float()
        is_skipped = torch.isfinite(norm).logical_not_().float()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in taken:
                    _step_one(
                        parameter, taken[parameter], self.state[parameter], group, shrinkage, is_skipped
                    )
        return norm

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state exactly, bit by bit, settings too; parameters become their masters' roundings.

        torch's own method would cast masters and moments to the parameters' type.

        Raises:
            ValueError: it is the state of other parameters.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        if [len(group["params"]) for group in groups] != [
            len(group["params"]) for group in self.param_groups
        ]:
            raise ValueError(
                f"the saved state is of {len(states)} parameters in {len(groups)} groups, "
                f"this optimizer has {len(self.state)} in {len(self.param_groups)}"
            )
        for number, parameter in enumerate(self._parameters()):
            _check_state(number, self.state[parameter], states[number])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for number, parameter in enumerate(self._parameters()):
            state = self.state[parameter]
            for name, tensor in state.items():
                tensor.copy_(states[number][name])
            if "master" in state:
                parameter.copy_(state["master"])

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _own_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {parameter: parameter.grad for parameter in self._parameters() if parameter.grad is not None}


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm over all gradients, summed in a fixed order, float32 at least."""
    if not gradients:
        raise ValueError("no parameter has a gradient; call backward before step")
    norms = [torch.linalg.vector_norm(gradient, dtype=_exact_type(gradient.dtype)) for gradient in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _exact_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _initial_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    exact = _exact_type(parameter.dtype)
    state = {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, dtype=exact, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=exact, memory_format=torch.preserve_format),
    }
    if parameter.dtype != exact:
        state["master"] = parameter.detach().to(exact)
    return state


def _step_one(
    parameter: nn.Parameter,
    gradient: Tensor,
    state: dict[str, Tensor],
    group: dict[str, Any],
    shrinkage: Tensor,
    is_skipped: Tensor,
) -> None:
    weights = state.get("master", parameter)
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradient.to(weights.dtype)],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [],
        [state["step"]],
        fused=True,
        grad_scale=shrinkage,
        found_inf=is_skipped,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    if weights is not parameter:
        parameter.copy_(weights)


def _check_state(number: int, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if own.keys() != saved.keys():
        raise ValueError(
            f"the saved state of parameter {number} has {sorted(saved)}, this optimizer's has {sorted(own)}; "
            "the parameters' types differ"
        )
    for name, tensor in own.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            raise ValueError(
                f"the saved {name} of parameter {number} is {list(saved[name].shape)} {saved[name].dtype}, "
                f"this optimizer's is {list(tensor.shape)} {tensor.dtype}"
            )
