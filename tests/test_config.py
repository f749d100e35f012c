"""Flags, YAML, what is printed, and every file the project ships."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ds_flux import checks, commands, config, demo
from ds_flux.commands import TrainCommand
from ds_flux.config import OptimConfig, TrainConfig
from ds_flux.families import tiny
from ds_flux.zero import ds_config
from ds_flux.zero.ds_config import ModelSize, Ranks
from tests.conftest import Assets, Done
from tests.distributed import ROOT

SIZE = ModelSize(num_params=160_000_000, num_block_params=10_000_000, num_largest_param=6_000_000, num_block_tensors=12)
RANKS = Ranks(num=8, num_per_node=4)
JSON_FILES = sorted((ROOT / "ds_configs").glob("*.json"))


def load(*arguments: str) -> config.Config:
    return config.load(list(arguments), "test", TrainCommand)[0]


def test_command_line_wins_over_yaml_wins_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rate: 3.0e-4\nseed: 5\nrandom_flip: true\n")
    file = ("--config", str(tmp_path / "run.yaml"))
    for arguments in ((*file, "--seed", "7"), ("--seed", "7", *file), ("--seed=7", f"--config={file[1]}")):
        settings = load(*arguments)
        assert (settings.optim.learning_rate, settings.run.seed, settings.data.random_flip) == (3e-4, 7, True)
        assert settings.train.train_batch_size == 1


def test_bare_switches_as_in_diffusers_scripts() -> None:
    settings = load("--gradient_checkpointing", "--random_flip", "--center_crop", "false", "--seed", "1")
    assert (settings.model.gradient_checkpointing, settings.data.random_flip, settings.data.center_crop) == (True, True, False)


def test_written_settings_read_back(tmp_path: Path) -> None:
    settings = load("--rank", "4", "--instance_prompt", "no: yes", "--timestep_shift", "3")
    (tmp_path / "config.yaml").write_text(settings.to_yaml())
    assert load("--config", str(tmp_path / "config.yaml")) == settings


def test_help_is_grouped_and_complete(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    text = capsys.readouterr().out
    assert all(f"--{flag} " in text for flag in load().flat())
    assert all(f"\n{section.__doc__}:" in text for section in config.SECTIONS.values())


def test_print_config_is_a_run_yaml(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        load("--seed", "9", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["seed"] == 9
    assert load().flat().keys() <= printed.keys()


def test_every_field_has_a_help_text() -> None:
    import dataclasses

    from docstring_parser import parse_from_object

    for section in (*config.SECTIONS.values(), commands.TrainCommand, commands.SampleCommand):
        documented = {p.arg_name for p in parse_from_object(section).params if p.description}
        assert documented == {f.name for f in dataclasses.fields(section)}, section


@pytest.mark.parametrize("recipe", sorted((ROOT / "launch/recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_are_right(recipe: Path) -> None:
    checks.check(load("--config", str(recipe)))


@pytest.mark.parametrize("path", JSON_FILES, ids=lambda path: path.name)
def test_shipped_deepspeed_configs_are_right(path: Path) -> None:
    if path.name.startswith("text_encoder"):
        final = ds_config.inference_config(str(path), True, SIZE, RANKS, False)
        assert final["zero_optimization"]["stage"] == 3 and "optimizer" not in final
        return
    optim, train = (
        OptimConfig(learning_rate=2e-4, max_grad_norm=0.3),
        TrainConfig(train_batch_size=2, gradient_accumulation_steps=3),
    )
    final = ds_config.train_config(str(path), optim, train, True, RANKS, SIZE)
    assert final["gradient_clipping"] == 0.3
    assert final["zero_optimization"].get("zero_hpz_partition_size", 4) == 4, "the processes of a node"
    assert (final["train_batch_size"], final["train_micro_batch_size_per_gpu"]) == (48, 2)
    assert final["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert final["optimizer"]["params"]["lr"] == 2e-4
    assert ("fused" in final["optimizer"]["params"]) == (ds_config.optimizer_device(final) == "none")
    assert "auto" not in json.dumps(final)


def test_dry_run_says_what_would_run(assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    done = run_main("train", *assets.flags(tmp_path / "run", rank=4), "--dry_run")
    assert done.status == 0
    assert "learning_rate: 0.001" in done.output and '"lr": 0.001' in done.output
    assert "6,144 parameters in 36 tensors of FluxTransformer2DModel (94,288 parameters)" in done.output
    assert "6 optimizer steps of 4 images" in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", tiny.TINY)
def test_demo_writes_a_model_that_trains(tmp_path: Path, run_main: Callable[..., Done], family: str) -> None:
    done = run_main("demo", "--family", family, "--output_dir", tmp_path / "demo", "--autoencoder_steps", 2)
    assert done.status == 0, done.errors
    done = run_main("train", "--config", tmp_path / "demo/run.yaml", "--dry_run")
    assert done.status == 0, done.errors
    assert re.search(r"700 optimizer steps of 32 images on 1 processes; 17\d\d images in 1 shape", done.output)
    validation = load("--config", str(tmp_path / "demo/run.yaml")).validation
    assert validation.validation_fraction > 0
    assert sorted(validation.validation_prompt) == sorted(map(demo.caption, range(10))), "what --score knows to judge"


def test_demo_of_an_unknown_family(tmp_path: Path, run_main: Callable[..., Done]) -> None:
    done = run_main("demo", "--family", "flux4", "--output_dir", tmp_path / "demo")
    assert (done.status, "unknown --family: flux4; the nearest known one is flux" in done.errors) == (2, True)
    assert not (tmp_path / "demo").exists()
