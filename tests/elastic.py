"""What the ranks of test_elastic do: make checkpoints, and go on from those of others in engines that stay alive."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
)
from torch import Tensor

from ds_flux import checkpoint, commands, config, manifest, runtime, trainer
from ds_flux.data.images import Batches
from ds_flux.run import Run
from ds_flux.run import setup as set_up

MOMENTS = ("exp_avg", "exp_avg_sq")
RUNS: dict[str, Run] = {}
"""by name; a later job of the same process goes on with it"""


def setup(name: str, argv: list[str]) -> Run:
    """The run of that name."""
    if name not in RUNS:
        RUNS[name] = set_up(config.load(argv, "ds-flux train", commands.TrainCommand)[0])
    return RUNS[name]


def steps(run: Run, first: int, last: int) -> list[dict[str, float]]:
    """The figures of steps first + 1 .. last."""
    batches = Batches(run.samples, run.schedule.micro_batches(first, last))
    done = [trainer.train_step(run, batches) for _ in range(first, last)]
    return [{"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr} for step in done]


def trained(run: Run) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of what trains, its fp32 weights and moments linked to it."""
    if run.manifest.zero_stage < 3:
        # DeepSpeed links the moments at the first step alone, and does not do it again after it has loaded
        run.engine.optimizer._hp_optimizer_states_linked = False
        run.engine.optimizer._lazy_init_hp_params_optimizer_state()
    return ((name, parameter) for name, parameter in run.engine.module.named_parameters() if parameter.requires_grad)


def whole_state(run: Run) -> dict[str, list[Tensor]]:
    """{name: fp32 weights and moments}, each put together from all ranks by DeepSpeed."""
    return {
        name: [safe_get_full_fp32_param(p).clone(), *(safe_get_full_optimizer_state(p, key).clone() for key in MOMENTS)]
        for name, p in trained(run)
    }


def local_state(run: Run, parameter: Any) -> tuple[int, list[Tensor]]:
    """The first element of a parameter that this rank has, and its fp32 weights and moments from there on."""
    if run.manifest.zero_stage == 3:
        master = safe_get_local_fp32_param(parameter)
        tensors = [master, *(safe_get_local_optimizer_state(parameter, key) for key in MOMENTS)]
        start = min(runtime.rank() * master.numel(), parameter.ds_numel)
        return start, [tensor[: parameter.ds_numel - start] for tensor in tensors]
    mapping = parameter._hp_mapping
    if mapping is None:
        return 0, [torch.empty(0)] * 3
    return mapping.lp_fragment_address.start, [mapping.get_hp_fragment(key) for key in (None, *MOMENTS)]


def is_equal(run: Run, kept: dict[str, list[Tensor]]) -> bool:
    """Whether all ranks together hold every element of what was kept, to the bit."""
    num_equal, num = 0, 0
    for name, parameter in trained(run):
        start, here = local_state(run, parameter)
        there = [tensor.flatten()[start : start + tensor_here.numel()] for tensor, tensor_here in zip(kept[name], here)]
        num_equal += sum(int((a == b).sum()) for a, b in zip(here, there))
        num += sum(tensor.numel() for tensor in kept[name])
    return int(runtime.all_reduce_sum(torch.tensor(num_equal))) == num


def make(name: str, argv: list[str], output_dir: str, step: int, last: int) -> None:
    """Train to `step`, save, train on to `last`; rank 0 keeps what was saved and the figures of the steps after it."""
    run = setup(name, argv)
    steps(run, 0, step)
    checkpoint.Saver(Path(output_dir), run.disk, None, in_background=False).save(run.engine, replace(run.manifest, step=step))
    folder = Path(output_dir) / f"checkpoint-{step}"
    state = whole_state(run)
    figures = steps(run, step, last)
    if runtime.rank() == 0:
        torch.save({"state": state, "figures": figures}, folder.parent / "kept.pt")


def go_on(name: str, argv: list[str], folders: list[str], path: str, last: int) -> None:
    """From each checkpoint in turn train on to `last`; rank 0 saves {checkpoint: what was found}."""
    is_fresh = name not in RUNS
    run, found = setup(name, [*argv, "--resume_from_checkpoint", folders[0]]), {}
    for folder in map(Path, folders):
        if found or not is_fresh:
            checkpoint.load(run.engine, folder, manifest.read_manifest(folder), run.disk)
        kept = torch.load(folder.parent / "kept.pt")
        first, equal = run.engine.global_steps, is_equal(run, kept["state"])
        found[folder.parent.name] = {
            "first": first, "is_equal": equal, "figures": steps(run, first, last), "kept": kept["figures"]
        }  # fmt: skip
    if runtime.rank() == 0:
        torch.save(found, path)
