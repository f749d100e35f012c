"""Checkpoints that plain DeepSpeed wrote, or accelerate with it: found, held against one another, and read.

No manifest says what they are: the ranks' files do, and only if they agree is anything read from them.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_flux import UserError
from ds_flux.manifest import Manifest
from ds_flux.streaming import TensorPieces
from ds_flux.zero.files import BASE_OPTIMIZER, MASTERS, in_one_piece, load, number, read_checkpoint

FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<slice>\d+)_(?:model|optim)_states\.pt")
ACCELERATE = "pytorch_model"  # what accelerate calls the folder of a model's files


@dataclass(frozen=True)
class File:
    """A rank's file and what is in it, its tensors mapped."""

    path: Path
    content: dict[str, Any]

    @property
    def rank(self) -> int | None:
        """None: the one file that is for all ranks."""
        rank = FILE.fullmatch(self.path.name)["rank"]
        return None if rank is None else int(rank)


def find(path: Path) -> Path | None:
    """The folder of the ranks' files: the path, what `latest` in it names, or accelerate's folder in it."""
    latest = path / "latest"
    named = [path / latest.read_text(errors="replace").strip()] if latest.is_file() else []
    return next((folder for folder in (path, *named, path / ACCELERATE) if any(names_in(folder))), None)


def names_in(folder: Path) -> Iterator[str]:
    """Of the files that are a rank's."""
    return (path.name for path in sorted(folder.glob("*_states.pt")) if FILE.fullmatch(path.name))


def read(folder: Path) -> list[TensorPieces]:
    """Every tensor of the model that the ranks' files hold, as `files.read_checkpoint`.

    Raises:
        UserError: a file is missing, cut short, or of another step, stage or number of processes than the others; it carries
            code; or the model was split over processes in another way than ZeRO's.
    """
    check_not_split(folder)
    try:
        return read_files(folder)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:  # other versions, or something else
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is no checkpoint in a form of DeepSpeed's that is known here ({what})") from None


def read_files(folder: Path) -> list[TensorPieces]:
    """As `read`, of files that have the form DeepSpeed gives them."""
    models = [open_file(folder / name) for name in names_in(folder) if "model_states" in name]
    optimizers = [open_file(folder / name) for name in names_in(folder) if "optim_states" in name]
    stage = stage_of(folder, models, optimizers)
    models = [file for file in models if (file.rank is None) == (stage < 3)]
    if stage > 0:
        check_whole(folder, stage, models, optimizers)
    elif not models:
        raise UserError(f"{folder} has no weights: there is no mp_rank_00_model_states.pt, and no optimizer was saved")
    used = models + (optimizers if stage > 0 else [])
    tensors = read_checkpoint(folder, manifest_of(stage, used))
    held = {tensor.name for tensor in tensors}
    # below stage 3 the module is whole beside the optimizer, and at stage 1 frozen weights are nowhere else
    rest = {} if stage == 3 else models[0].content["module"]
    return tensors + in_one_piece({name: tensor for name, tensor in rest.items() if name not in held})


def open_file(path: Path) -> File:
    """Raises UserError for what is no file of DeepSpeed's."""
    content = load(path)
    wanted = "module" if "model_states" in path.name else "optimizer_state_dict"
    if not isinstance(content, dict) or not isinstance(content.get(wanted), dict):
        raise UserError(f"{path} is no checkpoint file of DeepSpeed: it has no {wanted}")
    return File(path, content)


def check_not_split(folder: Path) -> None:
    """Raises UserError for tensor parallelism and experts, whose files hold parts of tensors."""
    for path in sorted(folder.glob("*_states.pt")):
        found = FILE.fullmatch(path.name)
        if found is None or int(found["slice"]) > 0:
            raise UserError(f"{path}: only what ZeRO alone has split is read, not tensor or pipeline parallelism or experts")


def stage_of(folder: Path, models: list[File], optimizers: list[File]) -> int:
    """The ZeRO stage.  Raises UserError where the files that would say it are missing."""
    if not models:
        raise UserError(f"{folder} is not whole: there is no *_model_states.pt")
    if all(file.content.get("param_shapes") is None for file in models):
        return 0
    if not optimizers:
        raise UserError(f"{folder} is not whole: zero_pp_rank_0_mp_rank_00_optim_states.pt is missing")
    stage = facts_of(optimizers[0])["ZeRO stage"]
    if stage not in MASTERS:
        raise UserError(f"{optimizers[0].path} is of ZeRO stage {stage}: expected 1, 2 or 3")
    return stage


def facts_of(file: File) -> dict[str, Any]:
    """What all files of one kind must have in common; None: it does not say."""
    if "optim_states" not in file.path.name:
        return {"step": file.content.get("global_steps"), "processes": file.content.get("dp_world_size")}
    state = file.content["optimizer_state_dict"]
    stage, count = state.get("zero_stage"), state.get("partition_count")
    return {
        "ZeRO stage": None if stage is None else int(stage),
        "processes": max(count) if isinstance(count, list) else count,
        "step": step_of(state.get(BASE_OPTIMIZER.get(stage))),
    }


def step_of(base: Any) -> int | None:
    """The step that torch's optimizer has counted, with the weights or with their group; None: it does not count."""
    if not isinstance(base, dict):
        return None
    states = base.get("state")
    entries = [*(states.values() if isinstance(states, dict) else []), *base.get("param_groups", [])]
    steps = [entry["step"] for entry in entries if isinstance(entry, dict) and "step" in entry]
    return number(steps[0]) if steps else None


def check_whole(folder: Path, stage: int, models: list[File], optimizers: list[File]) -> None:
    """Raises UserError unless every rank's file is there, and all are of one checkpoint and of their length."""
    check_alike(folder, models)
    check_alike(folder, optimizers)
    count = facts_of(optimizers[0])["processes"]
    check_ranks(folder, "optim", optimizers, count)
    if stage == 3:
        check_ranks(folder, "model", models, count)
    elif not models:
        raise UserError(f"{folder} is not whole: mp_rank_00_model_states.pt is missing")
    trained, counted = facts_of(optimizers[0])["step"], facts_of(models[0])["step"]
    if trained is not None and counted is not None and trained > counted:
        raise UserError(
            f"{folder} is not whole: {optimizers[0].path.name} is of step {trained}, {models[0].path.name} of step {counted}"
        )
    check_lengths(folder, stage, models[0].content["param_shapes"], optimizers)


def check_alike(folder: Path, files: list[File]) -> None:
    """Raises UserError for the file that says something else than most."""
    facts = {file.path.name: facts_of(file) for file in files}
    for what in next(iter(facts.values()), {}):
        common = Counter(fact[what] for fact in facts.values()).most_common(1)[0][0]
        usual = next(name for name, fact in facts.items() if fact[what] == common)
        for name, fact in facts.items():
            if fact[what] != common:
                words = [f"{value} processes" if what == "processes" else f"{what} {value}" for value in (fact[what], common)]
                raise UserError(f"{folder} is not whole: {name} is of {words[0]}, {usual} of {words[1]}")


def check_ranks(folder: Path, kind: str, files: list[File], count: int) -> None:
    """Raises UserError unless there is one file of a kind for each of `count` ranks."""
    ranks = [file.rank for file in files]
    for rank in range(count):
        if rank not in ranks:
            raise UserError(f"{folder} is not whole: zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt is missing")
    for file, rank in zip(files, ranks):
        if rank not in range(count) or ranks.count(rank) > 1:
            raise UserError(f"{folder} holds files of several checkpoints: {file.path.name} beside those of {count} processes")


def check_lengths(folder: Path, stage: int, groups: list[dict[str, Any]], optimizers: list[File]) -> None:
    """Raises UserError for a file whose flat weights are fewer than the model's."""
    states = [file.content["optimizer_state_dict"] for file in optimizers]
    for group, shapes in enumerate(groups):
        flats = [flat_of(file, state, stage, group) for file, state in zip(optimizers, states)]
        lengths = [flat.numel() for flat in flats]
        if stage == 3:
            missing = sum(-(-shape.numel() // len(flats)) for shape in shapes.values()) - min(lengths)
        else:
            paddings = states[0].get("param_alignment_paddings")
            gaps = sum(paddings[group]) if paddings else 0
            missing = sum(shape.numel() for shape in shapes.values()) + gaps - sum(lengths)
        if missing > 0:
            name = optimizers[lengths.index(min(lengths))].path.name
            raise UserError(f"{folder} is not whole: {name} holds {min(lengths)} weights, {missing} too few for the model")


def flat_of(file: File, state: dict[str, Any], stage: int, group: int) -> Tensor:
    """The fp32 weights of a group that a rank holds."""
    flats = state.get(MASTERS[stage])
    if not isinstance(flats, list) or group >= len(flats) or not isinstance(flats[group], Tensor):
        raise UserError(f"{file.path} is no checkpoint file of DeepSpeed: it has no fp32 weights")
    return flats[group]


def manifest_of(stage: int, files: list[File]) -> Manifest:
    """What `files.read_checkpoint` asks of a manifest."""
    return Manifest(
        step=files[0].content.get("global_steps", 0),
        family="",
        transformer_class="",
        transformer_config={},
        base_fingerprint="",
        lora=None,
        zero_stage=stage,
        world_size=len(files),
        data={},
        files={file.path.name: file.path.stat().st_size for file in files},
    )
