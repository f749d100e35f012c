"""The only two calls of `deepspeed.initialize`: an engine that trains, and a frozen one."""

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
    engine, *_ = deepspeed.initialize(model=module.requires_grad_(False).eval(), config=ds_config)
    engine.eval()
    return engine


def optimizer_step(engine: Engine) -> float:
    """`engine.step()` at an accumulation boundary; returns the global gradient norm before clipping."""
    norm = None
    if stage_of(engine.config) == 0:
        # DeepSpeed reports no norm at stage 0 in fp32; the gradients are averaged already
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else None
    engine.step()
    reported = engine.get_global_grad_norm()
    return float(reported if reported is not None else norm)
