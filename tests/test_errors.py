"""Bad input gets one line that names what was wrong, exit status 2, no traceback, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Assets, Done
from tests.distributed import launch

RunMain = Callable[..., Done]

# flags -> what the one line must say
BAD_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"lerning_rate": 1}, "unknown flag: --lerning_rate; the nearest known one is --learning_rate"),
    ({"learning_rate": "fast"}, "--learning_rate: expected float. Got value: fast"),
    ({"weighting_scheme": "sigma"}, "--weighting_scheme: expected Literal"),
    ({"config": "nowhere.yaml"}, "--config nowhere.yaml: no such file"),
    ({"pretrained_model_name_or_path": None}, "--pretrained_model_name_or_path is missing"),
    ({"pretrained_model_name_or_path": "./nowhere"}, "nowhere: no such folder"),
    ({"text_encoder_2_path": "./nowhere"}, "--text_encoder_2_path nowhere: no such folder"),
    ({"vae_path": "{digits}"}, "there is no vae in it"),
    ({"dataset_name": None}, "give either --dataset_name (or --data_files) or --instance_data_dir"),
    ({"instance_data_dir": "."}, "not both"),
    ({"dataset_name": "./nowhere"}, "no such folder"),
    ({"caption_column": None}, "needs --caption_column or --instance_prompt"),
    ({"caption_column": "txt"}, "txt; the nearest known one is text"),
    ({"train_batch_size": 25}, "25 images (train_batch_size 25 x"),
    ({"train_batch_size": 0}, "--train_batch_size 0 must be 1 or more"),
    ({"resolution": 40}, "--resolution 40 is not a multiple of 16"),
    ({"proportion_empty_prompts": 1.5}, "--proportion_empty_prompts 1.5 is not between 0 and 1"),
    ({"timestep_shift": "much"}, "--timestep_shift much: expected none, resolution or a number"),
    ({"lora_alpha": 4}, "LoRA flags without --rank have no effect"),
    ({"rank": 4, "lora_layers": "attn.to_q,attn.to_z"}, "attn.to_z; the nearest known one is attn.to_"),
    ({"rank": 4, "lora_init_from": "./nowhere"}, "LoRA nowhere: no such file"),
    ({"transformer_config": "debug"}, "--transformer_config needs --from_scratch"),
    ({"from_scratch": "true", "transformer_config": "debgu"}, "the nearest known one is debug"),
    ({"deepspeed_config": "nowhere.json"}, "DeepSpeed config nowhere.json: no such file"),
    ({"resume_from_checkpoint": "./nowhere"}, "no such folder"),
    ({"resume_from_checkpoint": "{digits}"}, "is no checkpoint of ds_flux"),
]

# DeepSpeed JSON -> what the one line must say
BAD_JSON: list[tuple[Any, str]] = [
    ({"zero_optimizaton": {"stage": 3}}, "zero_optimizaton; the nearest known one is zero_optimization"),
    ({"zero_optimization": {"stage": 3, "overlap_com": True}}, "overlap_com; the nearest known one is overlap_comm"),
    ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 3, "sub_group_size": "big"}}, "sub_group_size"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}, "devise; the nearest known one is device"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param works at stage 3 only"),
    ({"gradient_clipping": 0.5}, "gradient_clipping 0.5 but --max_grad_norm 1.0"),
    ({"train_micro_batch_size_per_gpu": 3}, "train_micro_batch_size_per_gpu 3 but --train_batch_size 4"),
    ({"optimizer": {"params": {"lr": 1}}}, "lr 1 but --learning_rate 0.001"),
    ({"bf16": {"enabled": True}}, "enabled True but --mixed_precision no"),
    ({"fp16": {"enabled": True}}, "fp16"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler belongs to --lr_scheduler"),
    ({"steps_per_print": "auto"}, 'nothing decides steps_per_print "auto"'),
    ("{", "is not JSON"),
    ({"compile": {"deepcompile": True}}, "compile has no effect here: use --compile"),
    ({"sequence_parallel_size": 2}, "use --sequence_parallel"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "MiCS is gone from DeepSpeed"),
    ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size works at stage 3 only"),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "zero_hpz_partition_size 2 does not divide the 1 processes of a node",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}},
        "leave one out",
    ),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights needs a GPU"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        "offload_param: nvme_path /nowhere is no folder on this node",
    ),
]


def one_line(done: Done, message: str) -> None:
    """Exit status 2 and, besides what libraries print, one line of ours that holds the message."""
    ours = [line for line in done.errors.splitlines() if line.startswith("ds-flux: error: ")]
    assert done.status == 2
    assert len(ours) == 1 and message in ours[0], done.errors
    assert "Traceback" not in done.errors


@pytest.mark.parametrize("flags, message", BAD_FLAGS)
def test_bad_flags(
    assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_main: RunMain, flags: dict, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {key: str(value).format(digits=assets.digits) if value is not None else None for key, value in flags.items()}
    one_line(run_main("train", *assets.flags(tmp_path / "run", **flags)), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content, message", BAD_JSON)
def test_bad_deepspeed_json(assets: Assets, tmp_path: Path, run_main: RunMain, content: Any, message: str) -> None:
    path = tmp_path / "zero.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    one_line(run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=path)), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("lerning_rate: 1", "lerning_rate; the nearest known one is learning_rate"),
        ("a: [", "is not YAML"),
        ("- a", "expected `key: value` lines"),
        ("mixed_precision: no", 'write mixed_precision: "no"'),
        ("learning_rate: fast", "--learning_rate: expected float"),
    ],
)
def test_bad_yaml(assets: Assets, tmp_path: Path, run_main: RunMain, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    arguments = assets.flags(tmp_path / "run", learning_rate=None)
    one_line(run_main("train", "--config", path, *arguments), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("component", ["vae", "text_encoder", "tokenizer_2", "scheduler", "transformer"])
def test_missing_component(assets: Assets, tmp_path: Path, run_main: RunMain, component: str) -> None:
    model = shutil.copytree(assets.model, tmp_path / "model")
    shutil.rmtree(model / component)
    done = run_main("train", *assets.flags(tmp_path / "run", pretrained_model_name_or_path=model))
    one_line(done, f"there is no {component} in it")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["missing", "unexpected", "wrongly shaped", "cut short", "no such weight file"])
@pytest.mark.parametrize("component", ["transformer", "text_encoder_2"])
def test_weights_that_do_not_fit(assets: Assets, tmp_path: Path, run_main: RunMain, kind: str, component: str) -> None:
    model = shutil.copytree(assets.model, tmp_path / "model")
    path = sorted((model / component).glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    match kind:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["strange.weight"] = tensors[name].clone()
        case "wrongly shaped":
            tensors[name] = tensors[name][:1].clone()
    save_file(tensors, path, {"format": "pt"})
    if kind == "cut short":
        path.write_bytes(path.read_bytes()[:-10])
    if kind == "no such weight file":
        path.unlink()
    done = run_main("train", *assets.flags(tmp_path / "run", pretrained_model_name_or_path=model))
    one_line(done, kind)
    named = {"unexpected": "strange.weight", "cut short": path.name, "no such weight file": path.name}
    assert named.get(kind, name) in done.errors
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_written_over(assets: Assets, tmp_path: Path, run_main: RunMain) -> None:
    arguments = assets.flags(tmp_path / "run", deepspeed_config=assets.ds_config(0), max_train_steps=1)
    assert run_main("train", *arguments).status == 0
    one_line(run_main("train", *arguments), "holds checkpoints of an earlier run")


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--prompt is missing"),
        (["--prompt", "a", "--height", "33"], "--height 33 and --width"),
        (["--prompt", "a", "--num_inference_steps", "0"], "--num_inference_steps 0 must be 1 or more"),
        (["--prompt", "a", "--image", "./nowhere.png"], "--image ./nowhere.png cannot be read"),
        (["--prompt", "a", "--lora", "./nowhere"], "LoRA nowhere: no such file"),
        (["--prompt", "a", "--transformer", "./nowhere"], "--transformer_path nowhere: no such folder"),
    ],
)
def test_bad_sample_flags(assets: Assets, tmp_path: Path, run_main: RunMain, flags: list[str], message: str) -> None:
    target = tmp_path / "samples"
    one_line(run_main("sample", "--pretrained_model_name_or_path", assets.model, "--sample_dir", target, *flags), message)
    assert not target.exists()


def test_unknown_command_and_help(run_main: RunMain) -> None:
    done = run_main("trian")
    assert (done.status, "unknown command trian" in done.errors) == (2, True)
    done = run_main("--help")
    assert done.status == 0 and all(name in done.output for name in ("train", "consolidate", "sample", "demo"))


def test_one_line_through_the_launcher(assets: Assets, tmp_path: Path) -> None:
    """Two ranks meet the same error: it is said once, and the launcher hands the status on."""
    bad = {"pretrained_model_name_or_path": "./nowhere"}
    done = launch(2, "ds_flux", "train", *assets.flags(tmp_path / "run", **bad))
    one_line(Done(done.returncode, done.stdout, done.stderr), "nowhere: no such folder")
    assert not (tmp_path / "run").exists()
