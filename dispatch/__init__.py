"""Losses at the end of a language model, on the best kernels the device can run, without the [N, V] logits.

    from headmux import get_op
    loss = get_op("flce")(hidden_states, lm_head.weight, labels)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headmux import contract, errors, registry
from headmux.registry import get_op
from headmux.select import use_backend

if TYPE_CHECKING:
    from headmux.backends.common.budget import budget as budget
    from headmux.contract import Selection

__version__ = "0.1.0"
__all__ = ["__version__", "budget", "contract", "errors", "explain", "get_op", "registry", "use_backend"]


# loaded here, so that a torch.compile'd function can call get_op without an import, which it could not trace
for _name in registry.op_names():
    get_op(_name)


def explain(op: str, *args: Any, **kwargs: Any) -> Selection:
    """Which backend would run this call of an op, and why not the others. Takes the op's own arguments."""
    return get_op(op).explain(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name == "budget":
        from headmux.backends.common.budget import budget

        return budget
    raise AttributeError(f"module 'headmux' has no attribute {name!r}")
