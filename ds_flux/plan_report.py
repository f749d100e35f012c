"""The command `ds-flux plan`: a plan as a table or as JSON, and its one line at the start of a run."""

import json
from dataclasses import asdict
from typing import Any

from ds_flux import UserError, assemble, outline
from ds_flux.commands import PlanCommand
from ds_flux.config import Config
from ds_flux.data.sources import open_source
from ds_flux.plan import GIB, Machine, Plan, Planner, Row, Setting, variants_in

COLUMNS = (
    "weights", "grads", "optimizer", "EMA", "gathered", "buckets", "activ.", "step", "text", "GPU", "pinned", "pageable",
    "NVMe", "network",
)  # fmt: skip

DISK = {"checkpoint": 1, "latents_of_sample": 1000, "text_of_prompt": 1000, "caches": 1}  # how many are told of


def report(config: Config, command: PlanCommand, config_path: str | None) -> str:
    """What `ds-flux plan` prints.  Raises UserError for flags without sense, or models without shapes."""
    machine = machine_of(command)
    shapes = outline.draw(config)
    assemble.check_fits_model(config, shapes.architecture)
    plan = Planner(config, shapes, machine).plan(variants_in(command.ds_configs))
    if command.json:
        return json.dumps(as_json(plan, config_path), indent=2)
    return as_text(plan, config_path)


def machine_of(command: PlanCommand) -> Machine:
    """The machine that the flags describe.  Raises UserError."""
    counts = {"num_gpus": command.num_gpus, "nodes": command.nodes}
    sizes = {"gpu_memory_gib": command.gpu_memory_gib, "host_memory_gib": command.host_memory_gib, "nvme_gib": command.nvme_gib}
    for name, value in {**counts, **sizes}.items():
        if name in ("num_gpus", "gpu_memory_gib") and value is None:
            raise UserError(f"--{name} is missing: the GPUs of a node and the memory of each")
        if value is not None and value <= 0 and not (name == "nvme_gib" and value == 0):
            raise UserError(f"--{name} {value:g} must be more than 0")
    if command.reserve_gib < 0 or command.reserve_gib >= command.gpu_memory_gib:
        raise UserError(f"--reserve_gib {command.reserve_gib:g} must be between 0 and --gpu_memory_gib")
    return Machine(
        num_nodes=command.nodes,
        gpus_per_node=command.num_gpus,
        gpu_bytes=(command.gpu_memory_gib - command.reserve_gib) * GIB,
        host_bytes=float("inf") if command.host_memory_gib is None else command.host_memory_gib * GIB,
        nvme_bytes=command.nvme_gib * GIB,
    )


def gib(num_bytes: float) -> str:
    """GiB with as many digits as help."""
    value = num_bytes / GIB
    return "" if value == 0 else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def cells(row: Row, machine: Machine) -> list[str]:
    """Of one row, by `COLUMNS`."""
    one, gpus = row.transformer, machine.gpus_per_node
    per_gpu = [
        one.weights, one.gradients, one.optimizer, one.ema, one.gathered, one.buckets, row.activations.peak_bytes, one.step,
        row.text.weights + row.small_bytes, row.device_bytes,
    ]  # fmt: skip
    per_node = [gpus * (one.pinned + row.text.pinned), gpus * (one.pageable + row.text.pageable), gpus * row.nvme_bytes]
    return [gib(value) for value in (*per_gpu, *per_node, row.sent_bytes)]


def verdict(row: Row, machine: Machine) -> str:
    """Whether it fits, and else what is missing."""
    lacks = row.lacks(machine)
    return (
        "fits" if not lacks else "no: " + ", ".join(f"{num_bytes / GIB:.1f} more {what}" for what, num_bytes in lacks.items())
    )


def name_of(row: Row, own: Setting) -> str:
    """The DeepSpeed config, and flags that are not the run's own."""
    flags = row.setting.flags(own)
    return " ".join([row.setting.deepspeed_config.removeprefix("ds_configs/"), *flags[2:]])


def as_text(plan: Plan, config_path: str | None) -> str:
    """A table, what it stands for, and the recommendation."""
    machine, own = plan.machine, plan.own
    rows = plan.rows + plan.others
    table = [["", *COLUMNS, ""], *([name_of(row, own), *cells(row, machine), verdict(row, machine)] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [heading(plan), ""]
    for line in table:
        middle = "  ".join(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1]))
        lines.append(f"{line[0].ljust(widths[0])}  {middle}  {line[-1]}".rstrip())
    lines += [f"{path}: {reason}" for path, reason in plan.refused.items()]
    lines += [
        "",
        "GiB.  On each GPU: what is there all the time (weights, grads, optimizer, EMA, text: the frozen models), and the",
        "larger of gathered + buckets + activ. in the backward pass and of step.  On each node: pinned, pageable, NVMe.",
        "network: what a GPU receives in an optimizer step.  The process itself takes about 1 GiB of host memory more.",
        "",
        *activation_lines(plan),
        *disk_lines(plan),
        *(f"note: {note}" for note in plan.outline.notes),
        "",
        *advice(plan, config_path),
    ]
    return "\n".join(lines)


def heading(plan: Plan) -> str:
    """The model, the machine, the work of a step."""
    weights, machine, row = plan.outline.weights, plan.machine, plan.rows[0]
    host = "" if machine.host_bytes == float("inf") else f" and {machine.host_bytes / GIB:g} GiB of host memory"
    flops = step_flops(plan, row)
    return (
        f"{sum(weights.trainable) / 1e9:.3g}e9 of {sum(weights.every) / 1e9:.3g}e9 weights of "
        f"{type(plan.outline.transformer).__name__} train; {machine.num_nodes} x {machine.gpus_per_node} GPUs with "
        f"{machine.gpu_bytes / GIB:g} GiB for tensors{host} on each node\n"
        f"a step: {row.setting.train_batch_size} images x {row.setting.gradient_accumulation_steps} micro steps x "
        f"{machine.num_ranks} GPUs, {flops / 1e15:.3g}e15 floating-point operations of the transformer on all of them"
    )


def step_flops(plan: Plan, row: Row) -> float:
    """Of the transformer, in an optimizer step, on all GPUs."""
    return float(row.activations.num_flops) * row.setting.gradient_accumulation_steps * plan.machine.num_ranks


def activation_table(plan: Plan) -> list[dict[str, Any]]:
    """Peak of activations by resolution, checkpointing and batch: measured for one and two images, the rest follows."""
    table, shapes = [], plan.outline
    for side in sorted({512, 1024, *shapes.config.data.resolutions}):
        for checkpointing in (False, True):
            one, two = (shapes.measure(side, number, checkpointing).peak_bytes for number in (1, 2))
            sizes = {number: one + (number - 1) * (two - one) for number in (1, 2, 4, 8)}
            table.append({"resolution": side, "gradient_checkpointing": checkpointing, "bytes_by_batch_size": sizes})
    return table


def activation_lines(plan: Plan) -> list[str]:
    """The same in words."""
    lines = ["activ. by resolution and --train_batch_size (1, 2, 4, 8), without and with --gradient_checkpointing:"]
    for entry in activation_table(plan):
        sizes = "  ".join(gib(num_bytes).rjust(6) for num_bytes in entry["bytes_by_batch_size"].values())
        lines.append(f"{entry['resolution']:8}  {'with' if entry['gradient_checkpointing'] else 'without':7}  {sizes}")
    return [*lines, ""]


def disk(plan: Plan) -> dict[str, float]:
    """Bytes of one checkpoint, and of a sample's records in the caches; of all samples where the data can be opened."""
    shapes, side = plan.outline, max(plan.outline.config.data.resolutions)
    batch = shapes.batch(side, 1)
    image = (batch.latents.numel() + sum(reference.numel() for reference in batch.references)) * 4
    text = sum(feature.nbytes for feature in batch.text.values())
    found: dict[str, float] = {"checkpoint": plan.rows[0].checkpoint_bytes, "latents_of_sample": image, "text_of_prompt": text}
    data = shapes.config.data
    if (data.cache_latents or data.cache_text) and not data.streaming:
        try:
            number = len(open_source(data))
        except UserError:
            return found
        found["caches"] = number * (image * data.cache_latents + text * data.cache_text)
    return found


def disk_lines(plan: Plan) -> list[str]:
    """The same in words."""
    found = disk(plan)
    checkpoint, latents, text, whole = (f"{found.get(name, 0) * number / GIB:.3g} GiB" for name, number in DISK.items())
    return [
        f"disk: a checkpoint {checkpoint}, one more while it is written; caches, for 1000 samples: latents {latents}, "
        f"prompts {text}" + (f"; of all samples {whole}" if "caches" in found else "")
    ]


def advice(plan: Plan, config_path: str | None) -> list[str]:
    """The recommendation, or how far the nearest is from fitting."""
    row = plan.recommended
    if row is None:
        nearest = plan.nearest
        return [
            "nothing fits; the nearest is "
            + name_of(nearest, plan.own)
            + ": "
            + verdict(nearest, plan.machine).removeprefix("no: ")
        ]
    return [f"recommended: {name_of(row, plan.own)}", plan.command(row, config_path)]


def as_json(plan: Plan, config_path: str | None) -> dict[str, Any]:
    """Everything, in bytes."""
    weights, row = plan.outline.weights, plan.recommended
    return {
        "model": type(plan.outline.transformer).__name__,
        "num_weights": sum(weights.every),
        "num_trainable": sum(weights.trainable),
        "machine": {name: None if value == float("inf") else value for name, value in asdict(plan.machine).items()},
        "rows": [row_as_json(row, plan) for row in plan.rows + plan.others],
        "refused": plan.refused,
        "activations": activation_table(plan),
        "disk_bytes": disk(plan),
        "notes": list(plan.outline.notes),
        "recommended": None if row is None else {**row_as_json(row, plan), "command": plan.command(row, config_path)},
        "nearest": row_as_json(plan.nearest, plan),
    }


def row_as_json(row: Row, plan: Plan) -> dict[str, Any]:
    """One row, with its sums."""
    sums = {
        "device_bytes": row.device_bytes,
        "host_bytes_of_node": row.host_bytes * plan.machine.gpus_per_node,
        "nvme_bytes_of_node": row.nvme_bytes * plan.machine.gpus_per_node,
        "flops_of_step": step_flops(plan, row),
        "lacks_bytes": row.lacks(plan.machine),
    }
    return {**asdict(row), **sums}
