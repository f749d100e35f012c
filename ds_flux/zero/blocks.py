"""What is done to the blocks of a transformer, the members of its module lists, before an engine takes it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.utils.checkpoint import checkpoint

Call = Callable[..., Any]  # (block, its arguments) -> what it returns


def blocks_of(transformer: nn.Module) -> list[nn.Module]:
    """Of all module lists, in order; of nested ones the outer."""
    lists = [child for child in transformer.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks]


def plain_call(block: nn.Module, *arguments: Any) -> Any:
    """The block, called."""
    return block(*arguments)


def recomputing(transformer: nn.Module, every: int, offload: bool) -> Call:
    """A call that recomputes the activations of blocks in the backward pass (Chen et al. 2016).

    Args:
        every: of so many blocks the first is recomputed, and the others keep what they made; 1: all are.
        offload: keep what a block is recomputed from in CPU memory; pinned, so that copies overlap with computation.
    """
    chosen = set(blocks_of(transformer)[::every])
    device = get_accelerator().device_name()

    def call(block: nn.Module, *arguments: Any) -> Any:
        if block not in chosen:
            return block(*arguments)
        with torch.autograd.graph.save_on_cpu(device != "cpu", device) if offload else nullcontext():
            return checkpoint(block, *arguments, use_reentrant=False)

    return call


def compiled(transformer: nn.Module, call: Call) -> Call:
    """Have each block's own forward compiled; blocks of one class share what is compiled.

    A block becomes a leaf for ZeRO-3: gathered as one before its forward and let go behind it, so that no hook of ZeRO's is
    inside what is compiled.  `Module.compile`, and diffusers' `compile_repeated_blocks` by it, would compile those hooks too.
    """
    for block in blocks_of(transformer):
        set_z3_leaf_module(block, True)
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]

    def call_of_leaf(block: nn.Module, *arguments: Any) -> Any:
        # DeepSpeed takes a leaf's backward for done when its positional arguments have their gradients: without any that
        # has one (the first block's, where only adapters train) it would be done before it began
        first = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
        if not first.requires_grad:
            first.requires_grad_()
        return call(block, *arguments)

    return call_of_leaf


def have_called(transformer: Any, call: Call) -> None:
    """Have the blocks called so while gradients are recorded: where diffusers calls them for checkpointing, positionally."""
    transformer.enable_gradient_checkpointing(call)
