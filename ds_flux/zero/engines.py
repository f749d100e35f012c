"""The only two calls of `deepspeed.initialize`: an engine that trains, and a frozen one."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_flux.zero.ds_config import stage_of

Engine = deepspeed.DeepSpeedEngine
LRSchedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def train_engine(module: nn.Module, ds_config: dict[str, Any], schedule: LRSchedule) -> Engine:
    """An engine over the trainable parameters of `module`, whose keys stay the module's own.

    `schedule` makes the learning-rate schedule of the optimizer that the config names; the engine steps it once for each
    optimizer step.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=trainable, config=ds_config, lr_scheduler=schedule)
    return engine


def inference_engine(module: nn.Module, ds_config: dict[str, Any]) -> Engine:
    """A frozen ZeRO-3 engine: gathers each layer as it runs, has no optimizer.  Never save it: rank 0 would be alone."""
    exact = [(owner, name, b) for owner in module.modules() for name, b in owner.named_buffers(recurse=False)]
    engine, *_ = deepspeed.initialize(model=module.requires_grad_(False).eval(), config=ds_config)
    for owner, name, buffer in exact:
        # DeepSpeed casts these as well: the frequencies of a rotary embedding lose their meaning in bf16
        owner._buffers[name] = buffer.to(owner._buffers[name].device)
    engine.eval()
    return engine


def optimizer_step(engine: Engine) -> float:
    """`engine.step()` at an accumulation boundary; returns the global gradient norm before clipping.

    Where that is not finite, weights, optimizer and learning-rate schedule stay as they are: DeepSpeed sees to it, but for
    stage 0 in fp32.
    """
    norm = None
    if stage_of(engine.config) == 0:
        # DeepSpeed reports no norm at stage 0 in fp32; the gradients are averaged already
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else None
    if norm is not None and not math.isfinite(norm):
        engine.zero_grad()
        engine.micro_steps += 1
        engine.global_steps += 1
        engine.skipped_steps += 1
        return norm
    if engine.global_steps == 0:
        give_back_freed_memory()
    engine.step()
    reported = engine.get_global_grad_norm()
    return float(reported if reported is not None else norm)


def give_back_freed_memory() -> None:
    """Return what set-up and the backward pass have freed to the operating system, before the optimizer makes its state.

    glibc keeps it otherwise, beside the new state: a twentieth of a rank's memory where the optimizer is on the CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc only
        libc.malloc_trim(0)
