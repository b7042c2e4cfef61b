"""What a rank that joins takes beside models and optimizers, so that it trains as the others do.

Gradients are what the program has left of them: one with two optimizers may step one of them less often. Outside of the
models, there are parameters that an optimizer trains, and the running statistics of normalization layers, which follow from
outputs that a replaying rank does not compute. A schedule may make no step where a scaler leaves one out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dlrover.errors import InfrastructureError
from dlrover.training.replicas.sharded import local


class Gradients:
    """Gradients at the beginning of a step, as part of a replica's state.

    A program may keep them, or parts of them, beyond the step of an optimizer. Zeros differ from none: an optimizer goes on
    with the momentum of a parameter whose gradient is zero.
    """

    def __init__(self, trained: Callable[[], Sequence[torch.Tensor]]) -> None:
        """``trained`` returns the parameters of all optimizers."""
        self._trained = trained

    def _parameters(self) -> list[torch.Tensor]:
        return list({id(one): one for one in self._trained()}.values())

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the gradient of each parameter, or None; of a sparse one, its indices and values."""
        return {"gradients": [_sent(parameter.grad) for parameter in self._parameters()]}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Take the gradients of another rank."""
        for parameter, sent in zip(self._parameters(), state["gradients"], strict=True):
            if isinstance(sent, dict):
                sent = torch.sparse_coo_tensor(  # noqa: PLW2901
                    sent["indices"], sent["values"], parameter.shape, check_invariants=True
                )
            parameter.grad = None if sent is None else sent.to(device=parameter.device)


def _sent(gradient: torch.Tensor | None) -> Any:
    if gradient is None or not gradient.is_sparse:
        return gradient
    whole = gradient.coalesce()
    return {"indices": whole.indices(), "values": whole.values()}


class Beside:
    """Parameters that optimizers train, and running statistics, which no model has, as part of a replica's state."""

    def __init__(
        self,
        trained: Callable[[], Sequence[torch.Tensor]],
        norms: Sequence[Callable[[], Any]],
        held: Callable[[], set[int]],
    ) -> None:
        """``norms`` return the normalization layers in the order of their making, or None; ``held`` the ids of what models have."""
        self._trained, self._norms, self._held = trained, norms, held

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = self._held()
        found = {f"parameter {i}": one for i, one in enumerate(self._trained())}
        for i, made in enumerate(self._norms):
            layer = made()
            found |= {f"layer {i} {name}": one for name, one in layer.named_buffers()} if layer is not None else {}  # fmt: skip
        return {name: local(one) for name, one in found.items() if id(one) not in held}

    def state_dict(self) -> dict[str, Any]:
        """Return them as this rank has them, and how many layers its program has made."""
        return {"tensors": self._tensors(), "made": len(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take those of another rank; either one may still have a layer that the program has dropped.

        Raises:
            InfrastructureError: The other one has made other layers, so that theirs cannot be assigned.
        """
        own, others, made = self._tensors(), state["tensors"], len(self._norms)
        layers = [{name for name in names if name.startswith("layer ")} for names in (own, others)]
        if made != state["made"] and all(layers):
            raise InfrastructureError(
                f"--survive: this rank's program has made {made} normalization layers, and that of the others {state['made']}, so"
                " it cannot take the running statistics of those beside the models; all ranks start again."
            )
        for name in own.keys() & others.keys():
            own[name].copy_(others[name])


class Unsaved:
    """The buffers of modules that ``state_dict`` leaves out (``persistent=False``), as part of a replica's state."""

    def __init__(self, modules: Callable[[], Sequence[torch.nn.Module]]) -> None:
        self._modules = modules

    def _found(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Return where each buffer is."""
        parts = [
            (f"{i} {path}", part)
            for i, module in enumerate(self._modules())
            for path, part in module.named_modules()
        ]
        return {
            f"{path}.{name}": (part._buffers, name)  # noqa: SLF001 - torch tells them apart there only
            for path, part in parts
            for name in sorted(part._non_persistent_buffers_set)  # noqa: SLF001
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers; one may be None."""
        return {path: buffers.get(name) for path, (buffers, name) in self._found().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take those of another rank; they may have another size."""
        for path, (buffers, name) in self._found().items():
            own, taken = buffers.get(name), state.get(path)
            if taken is None:
                continue
            if own is not None and own.shape == taken.shape:
                with torch.no_grad():
                    own.copy_(taken)
            else:
                buffers[name] = taken if own is None else taken.to(device=own.device)


class Schedules:
    """The numbers of learning rate schedules, as part of a replica's state."""

    def __init__(self, made: Sequence[Callable[[], Any]]) -> None:
        """``made`` return the schedules in the order of their making, or None for those that the program has dropped."""
        self._made = made

    def _found(self) -> dict[str, dict[str, Any]]:
        found = {f"{i} {type(one).__name__}": one for i, made in enumerate(self._made) if (one := made()) is not None}  # fmt: skip
        return {name: vars(one) for name, one in found.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that are numbers, or lists of them."""
        return {
            name: {key: value for key, value in own.items() if _is_number(value)}
            for name, own in self._found().items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take those of another rank."""
        for name, own in self._found().items():
            own.update(state.get(name, {}))


def _is_number(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, int | float) for one in values)
