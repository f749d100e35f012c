"""`ds-flux tune`: settings that make a run fast on the machines that it has, found by measuring."""

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ds_flux import UserError, outline
from ds_flux.commands import TuneCommand
from ds_flux.config import Config
from ds_flux.halving import best_of
from ds_flux.manifest import write_atomically
from ds_flux.plan import GIB, Machine, Planner, Setting, variants_in
from ds_flux.runtime import has_accelerator
from ds_flux.trials import Candidate, Result, Trials
from ds_flux.zero.ds_config import auto_sizes

FASTER = 1.02  # a refinement must be, or it is noise
CLEARLY_LESS, TOO_MUCH = 0.9, ("over the bound", "out of memory")
NUM_AROUND = 3  # of the trials, for settings that differ from the best in one thing


def tune(config: Config, command: TuneCommand) -> str:
    """Search, write `ds_config.tuned.json` and the table; what to tell.

    Raises:
        UserError: flags without sense, or nothing fits or works.
    """
    machine, bound_gib = machine_of(command)
    shapes = outline.draw(config)
    planner = Planner(config, shapes, machine)
    planned = survivors(planner, command)
    if not planned:
        raise UserError(f"by the plan nothing fits {bound_gib:g} GiB; see `ds-flux plan`")
    folder = Path(command.folder or f"{config.run.output_dir}/tune")
    trials = Trials(config, machine, folder, command.hostfile, command.trial_limit_s, bound_gib)
    num_around = NUM_AROUND if command.trials >= 2 * NUM_AROUND else 0
    promising = still_promising(in_turns(list(planned)), planned, trials)
    best = best_of(promising, trials.speed, command.trials - num_around, command.steps)
    if best is None:
        reasons = sorted({f"{result.status}: {result.said}" for result in trials.results.values()})
        raise UserError(f"no trial worked ({'; '.join(reasons)[:400]}); see {trials.write_table()}")
    best = beside(best, planned, trials, num_around)
    best = refined(best, trials, planner, command)
    return written(best, trials, Setting.of(config))


def machine_of(command: TuneCommand) -> tuple[Machine, float]:
    """The machine to plan for, and the GiB that a process may take.  Raises UserError."""
    if command.num_gpus is None:
        raise UserError("--num_gpus is missing: the processes on each node")
    for name in ("num_gpus", "nodes", "trials", "steps", "trial_limit_s", "memory_gib"):
        value = vars(command)[name]
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value:g} must be more than 0")
    if command.steps < 2:
        raise UserError("--steps 1: the first step warms up and is not counted, so it takes 2 or more")
    if command.nodes > 1 and command.hostfile is None:
        raise UserError(f"--nodes {command.nodes} needs --hostfile")
    if command.hostfile is not None and not Path(command.hostfile).is_file():
        raise UserError(f"--hostfile {command.hostfile}: no such file")
    bound_gib = float("inf") if command.memory_gib is None else command.memory_gib
    on_host = not has_accelerator()
    host_gib = bound_gib * command.num_gpus if on_host else float("inf")
    machine = Machine(
        num_nodes=command.nodes,
        gpus_per_node=command.num_gpus,
        gpu_bytes=bound_gib * GIB,
        host_bytes=host_gib * GIB,
        nvme_bytes=float("inf"),
        device_is_host=on_host,
    )
    return machine, bound_gib


def survivors(planner: Planner, command: TuneCommand) -> dict[Candidate, float]:
    """{setting: planned GiB of a process} of all that fit by the plan, those first that should be fastest."""
    rows = []
    own, by_tokens = Setting.of(planner.config), planner.config.train.tokens_per_batch is not None
    for setting in grid(own, command.ds_configs):
        if by_tokens and setting.train_batch_size != own.train_batch_size:
            continue  # --tokens_per_batch decides over micro batches
        try:
            row = planner.row(setting)
        except UserError:
            continue
        if not row.lacks(planner.machine):
            rows.append(row)
    on_host = planner.machine.device_is_host
    return {
        Candidate(row.setting): (row.device_bytes + on_host * row.host_bytes) / GIB
        for row in sorted(rows, key=lambda row: row.cost())
    }


def still_promising(candidates: list[Candidate], planned: dict[Candidate, float], trials: Trials) -> Iterator[Candidate]:
    """Those that should take clearly less than any so far that took too much."""
    for candidate in candidates:
        failed = [one for one in trials.results.values() if one.status in TOO_MUCH]
        too_much = [gib for other, gib in planned.items() if any(is_of(one, other) for one in failed)]
        if planned[candidate] < CLEARLY_LESS * min(too_much, default=math.inf):
            yield candidate


def grid(own: Setting, ds_configs: str) -> Iterator[Setting]:
    """DeepSpeed config x checkpointing x micro batch, for the same global batch."""
    images = own.train_batch_size * own.gradient_accumulation_steps
    for path in dict.fromkeys((own.deepspeed_config, *variants_in(ds_configs))):
        for checkpointing in (False, True):
            for size in (size for size in range(1, images + 1) if images % size == 0):
                yield Setting(
                    deepspeed_config=path,
                    gradient_checkpointing=checkpointing,
                    train_batch_size=size,
                    gradient_accumulation_steps=images // size,
                )


def in_turns(candidates: list[Candidate]) -> list[Candidate]:
    """The first of each DeepSpeed config, then the second of each, ...: the plan's order is surer within a config."""
    places: Counter[str] = Counter()
    placed = []
    for candidate in candidates:
        placed.append((places[candidate.setting.deepspeed_config], candidate))
        places[candidate.setting.deepspeed_config] += 1
    return [candidate for _, candidate in sorted(placed, key=lambda pair: pair[0])]


def beside(best: Candidate, planned: dict[Candidate, float], trials: Trials, num: int) -> Candidate:
    """The fastest of the best and `num` others of its DeepSpeed config: another micro batch, or checkpointing or not."""
    num_steps = max(result.num_steps for result in trials.results.values())
    mine = [one for one in planned if one.setting.deepspeed_config == best.setting.deepspeed_config]
    others = [one for one in mine if num_changes(one.setting, best.setting) == 1]
    chosen = list(islice(still_promising(others, planned, trials), num))
    return max((best, *chosen), key=lambda one: trials.speed(one, num_steps))


def num_changes(one: Setting, other: Setting) -> int:
    """How many of the two differ: micro batch, checkpointing."""
    return sum(vars(one)[name] != vars(other)[name] for name in ("gradient_checkpointing", "train_batch_size"))


def refined(best: Candidate, trials: Trials, planner: Planner, command: TuneCommand) -> Candidate:
    """The best with other sizes of buckets and other small weights kept whole, one after the other, where that is faster."""
    num_steps = max(result.num_steps for result in trials.results.values())
    for changes in variations(best, planner)[: command.refinements]:
        other = replace(best, zero={**best.zero, **changes})
        if trials.speed(other, num_steps) > FASTER * trials.speed(best, num_steps):
            best = other
    return best


def variations(best: Candidate, planner: Planner) -> list[dict[str, int]]:
    """Sizes around those of "auto", of what the config has."""
    sizes = auto_sizes(planner.outline.size, planner.machine.ranks)
    known = best.ds_config().get("zero_optimization", {})
    factors = {
        "reduce_bucket_size": (4, 0.25),
        "stage3_prefetch_bucket_size": (2, 0.25),
        "stage3_param_persistence_threshold": (10, 0.1),
        "allgather_bucket_size": (4,),
    }
    # DeepSpeed wants buckets of even size
    return [
        {key: 2 * max(1, int(sizes[key] * factor / 2))}
        for number in range(2)
        for key, options in factors.items()
        if key in known
        for factor in options[number : number + 1]
    ]


def written(best: Candidate, trials: Trials, own: Setting) -> str:
    """The tuned config, the table and the plot on disk; and the flags to use."""
    path = trials.folder / "ds_config.tuned.json"
    write_atomically(path, json.dumps(best.ds_config(), indent=2) + "\n")
    table, plot = trials.write_table(), draw(list(trials.results.values()), trials.folder / "trials.png")
    flags = " ".join(replace(best.setting, deepspeed_config=str(path)).flags(own))
    result = max((one for one in trials.results.values() if is_of(one, best)), key=lambda one: one.num_steps)
    return (
        f"best of {len(trials.results)} trials: {result.images_per_s:.4g} images/s with {result.peak_gib:.3g} GiB, by "
        f"{best.setting.deepspeed_config} {best.zero or ''}\n{table}{plot}\nuse: {flags}"
    )


def is_of(result: Result, candidate: Candidate) -> bool:
    """Whether a result is one of this candidate."""
    return result.key == candidate.key(result.num_steps)


def draw(results: list[Result], path: Path) -> str:
    """Throughput against memory of all trials that ran, as a picture; what to tell of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "; no picture of it: pip install 'ds_flux[plot]'"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="peak memory of a process, GiB", ylabel="images per second")
    ran = [result for result in results if result.images_per_s]
    for name in sorted({result.deepspeed_config for result in ran}):
        here = [result for result in ran if result.deepspeed_config == name]
        for checkpointing, marker in ((False, "o"), (True, "^")):
            points = [(one.peak_gib, one.images_per_s) for one in here if one.gradient_checkpointing == checkpointing]
            label = f"{Path(name).stem}{' + checkpointing' if checkpointing else ''}"
            axes.scatter(*zip(*points), marker=marker, label=label) if points else None
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return f", {path}"
