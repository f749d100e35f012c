"""What the ranks of test_ema do: train with an average of the weights, and follow it in plain torch on whole weights."""

from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from ds_flux import commands, config, runtime, trainer
from ds_flux.data.images import Batches
from ds_flux.run import Run, setup
from ds_flux.zero.ema import masters_of
from tests.workers import fixed_inputs

Weights = dict[str, Tensor]


def whole(run: Run) -> Weights:
    """{name: fp32 weights} of what trains: in fp32 those that the module computes with, in bf16 the optimizer's."""
    named = {name: parameter for name, parameter in run.engine.module.named_parameters() if parameter.requires_grad}
    if run.config.model.mixed_precision == "no":
        with GatheredParameters(list(named.values()), enabled=run.manifest.zero_stage == 3):
            return {name: parameter.detach().clone() for name, parameter in named.items()}
    if run.manifest.zero_stage == 0:
        groups = zip(run.engine.optimizer.fp16_groups, run.engine.optimizer.fp32_groups)
        masters = {id(p): master for group in groups for p, master in zip(*group)}
        return {name: masters[id(parameter)].detach().clone() for name, parameter in named.items()}
    return {name: safe_get_full_fp32_param(parameter).detach().clone() for name, parameter in named.items()}


def here(run: Run) -> list[Tensor]:
    """Copies of all that this rank has: the module's weights, or its parts of them, and the optimizer's."""
    is_partitioned = run.manifest.zero_stage == 3
    parts = [p.ds_tensor if is_partitioned else p for p in run.engine.module.parameters()]
    return [tensor.detach().clone() for tensor in [*parts, *masters_of(run.engine).flats]]


def velocity(run: Run) -> Tensor:
    """What the engine says for the fixed inputs."""
    run.engine.eval()
    with torch.no_grad():
        said = run.engine(**fixed_inputs(next(run.engine.module.parameters()).dtype), return_dict=False)[0]
    run.engine.train()
    return said


def averages(run: Run) -> tuple[Weights, Tensor]:
    """The average, and what the engine says with it; sees to it that everything is afterwards as it was."""
    before = [*here(run), velocity(run), *run.ema.flats]
    average_before = [flat.clone() for flat in run.ema.flats]
    with run.ema.swapped():
        found = whole(run), velocity(run)
    after = [*here(run), velocity(run), *average_before]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "not restored"
    return found


def follow(argv: list[str], path: str, source: str | None, num_steps: int) -> None:
    """Train some steps, of which the second is not taken; save a checkpoint, and on rank 0 what was found."""
    run = setup(config.load(argv, "ds-flux train", commands.TrainCommand)[0])
    first, decay = run.first_step, run.config.optim.ema_decay
    expected = torch.load(source)["average"] if source else whole(run)
    start = averages(run)[0]
    is_same = all(torch.equal(start[name], tensor) for name, tensor in expected.items())
    batches = Batches(run.samples, run.schedule.micro_batches(first, first + num_steps))
    skipped = []
    for step in range(num_steps):
        poison: Any = None
        if step == 1:
            trained = [p for p in run.engine.module.parameters() if p.requires_grad]
            poison = trained[-1].register_hook(lambda gradient: gradient * torch.nan)
        skipped.append(not trainer.train_step(run, batches).is_taken)
        if poison:
            poison.remove()
        else:
            expected = {name: decay * expected[name] + (1 - decay) * tensor for name, tensor in whole(run).items()}
    average, said = averages(run)
    manifest = trainer.manifest_of(run, first + num_steps, batches)
    saver = trainer.make_saver(run)
    saver.save(run.engine, manifest, trainer.ema_files(run))
    saver.close()
    if runtime.rank() == 0:
        found = {"is_same": is_same, "skipped": skipped, "expected": expected, "average": average, "velocity": said}
        torch.save(found, path)
