"""Memory and computation of one forward and backward pass, measured on the meta device: shapes alone, no memory, no weights.

The pass is the real one, so whatever autograd keeps, and whatever gradient checkpointing does not, is counted as it is.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass."""

    peak_bytes: int
    """of everything but weights and their gradients"""
    num_flops: int

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.peak_bytes + other.peak_bytes, self.num_flops + other.num_flops)

    def __sub__(self, other: "Pass") -> "Pass":
        return self + other * -1

    def shared(self, num: int) -> "Pass":
        """By so many ranks, each with its share of the tokens."""
        return Pass(-(-self.peak_bytes // num), -(-self.num_flops // num))

    def __mul__(self, number: int) -> "Pass":
        return Pass(number * self.peak_bytes, number * self.num_flops)


def measure(module: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> Pass:
    """Of `loss_of(module)` and its backward pass, for a module on meta whose blocks lie in lists.

    The blocks of a list are alike, so it is measured with one and with two blocks of each, and what a block adds is taken as
    often as there are more.
    """
    lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child) > 1}
    hooks = [p.register_post_accumulate_grad_hook(forget) for p in module.parameters() if p.requires_grad]

    def with_blocks(numbers: dict[str, int]) -> Pass:
        for name, blocks in lists.items():
            setattr(module, name, blocks[: numbers[name]])
        return measure_whole(module, lambda: loss_of(module).backward())

    try:
        one_each = dict.fromkeys(lists, 1)
        least = total = with_blocks(one_each)
        for name, blocks in lists.items():
            total += (with_blocks({**one_each, name: 2}) - least) * (len(blocks) - 1)
    finally:
        for name, blocks in lists.items():
            setattr(module, name, blocks)
        for hook in hooks:
            hook.remove()
    return total


def measure_whole(module: nn.Module, compute: Callable[[], Any]) -> Pass:
    """What operations of `compute` calculate, and the most bytes they have at once, beside the weights of the module."""
    tracker = Tracker(module)
    with fused_attention(), tracker:
        compute()
    return Pass(tracker.peak_bytes, tracker.num_flops)


def forget(parameter: Tensor) -> None:
    """Drop a gradient as soon as it is there: ZeRO moves it into a bucket."""
    parameter.grad = None


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention on meta is what the fused kernels of real devices are: no matrix of all pairs of tokens."""
    own = F.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None:
            return own(query, key, value, attn_mask, **kwargs)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


class Tracker(TorchDispatchMode):
    """Bytes of all storages alive that operations have made, those of a module's weights not among them; and their FLOPs."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.now_bytes = self.peak_bytes = self.num_flops = 0
        self.known = weakref.WeakKeyDictionary({parameter.untyped_storage(): 0 for parameter in module.parameters()})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if flops_of := flop_registry.get(function.overloadpacket):
            self.num_flops += flops_of(*args, **(kwargs or {}), out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, until it is gone."""
        if storage in self.known:
            return
        self.known[storage] = storage.nbytes()
        weakref.finalize(storage, self.gone, storage.nbytes())
        self.now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def gone(self, num_bytes: int) -> None:
        """A storage is freed."""
        self.now_bytes -= num_bytes
