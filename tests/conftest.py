"""The small FLUX.1 and the digits that all tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ds_flux.data.store import Store
    from tests.nodes import Nodes
    from tests.pairs import Pairs

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# compiled once for an environment, and found again by every rank
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))

TRANSFORMER = dict(
    num_layers=1, num_single_layers=2, num_attention_heads=2, attention_head_dim=16, axes_dims_rope=(4, 6, 6),
    in_channels=16, joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True,
)  # fmt: skip
NUM_IMAGES = 24


@dataclass(frozen=True)
class Assets:
    """Paths of a model folder and a data set, and the flags that train on them."""

    folder: Path
    model: Path
    digits: Path

    def ds_config(self, stage: int, offload: bool = False, **zero: object) -> str:
        """A DeepSpeed JSON whose parameters are partitioned however small they are."""
        sections = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}), **zero}
        if offload:
            sections["offload_optimizer"] = {"device": "cpu"}
            sections |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
        path = self.folder / f"zero{stage}{'_offload' if offload else ''}{''.join(f'_{key}_{zero[key]}' for key in zero)}.json"
        path.write_text(json.dumps({"zero_optimization": sections}))
        return str(path)

    def flags(self, output_dir: Path, **changes: object) -> list[str]:
        """Arguments of `ds-flux train` for six steps of eight images; `changes` add to them or replace them, None drops."""
        flags = {
            "pretrained_model_name_or_path": self.model,
            "dataset_name": self.digits,
            "caption_column": "text",
            "output_dir": output_dir,
            "resolution": 32,
            "random_flip": "true",
            "max_sequence_length": 8,
            "mixed_precision": "no",
            "weighting_scheme": "logit_normal",
            "train_batch_size": 4,
            "max_train_steps": 6,
            "learning_rate": 1e-3,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 2,
            "proportion_empty_prompts": 0.1,
            "text_encoder_2_dropout": 0.2,
            "text_encoder_deepspeed_config": self.ds_config(3),
            "deepspeed_config": self.ds_config(3),
            **changes,
        }
        return [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A model that is small but has every part of the released one, with weights in several files."""
    import torch
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    from ds_flux import demo
    from ds_flux.families import tiny, tiny_autoencoder

    folder = tmp_path_factory.mktemp("assets")
    images, labels = demo.digits()
    torch.manual_seed(0)
    autoencoder = tiny_autoencoder.train(tiny_autoencoder.make(AutoencoderKL), images, num_steps=60)
    tiny.write("flux1", folder / "model", autoencoder, 0, demo.WORDS, TRANSFORMER)
    torch.manual_seed(0)  # torch's own start instead of adaLN-Zero: a gradient for every weight from the first step
    transformer = FluxTransformer2DModel(**TRANSFORMER)
    for path in (folder / "model/transformer").iterdir():
        path.unlink()
    transformer.save_pretrained(folder / "model/transformer", max_shard_size="200KB")
    demo.write_dataset(folder / "digits", images[:NUM_IMAGES], labels[:NUM_IMAGES])
    return Assets(folder, folder / "model", folder / "digits")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> "Pairs":
    """A small model of every family, and eight rows that are learnt by heart."""
    from tests import pairs

    transformer = dict(num_layers=2, num_single_layers=2, num_attention_heads=4)
    return pairs.write(tmp_path_factory.mktemp("pairs"), transformer, autoencoder_steps=150)


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Nodes"]:
    """Two nodes with addresses of their own on this machine."""
    from tests.nodes import NoNodesError, two_nodes

    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(two_nodes(tmp_path_factory.mktemp("nodes")))
        except NoNodesError as reason:
            pytest.skip(f"two nodes cannot be made here: {reason}")
        yield nodes


@pytest.fixture
def store(tmp_path: Path) -> "Store":
    """Twenty records in five shards."""
    from ds_flux.data.store import Store
    from tests.test_store import NUM, fill

    store = Store(tmp_path / "store")
    fill(store, range(NUM))
    assert len(store.shards) == 5
    return store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(["sh", "-c", '"$@"', "sh", *command], capture_output=True, text=True)  # there may be no mount
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int
    output: str
    errors: str


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Callable[..., Done]:
    """Run `ds-flux` with these arguments in this process."""
    from ds_flux import runtime
    from ds_flux.__main__ import main

    # the process group outlives a command here: DeepSpeed cannot join a second one
    monkeypatch.setattr(runtime, "shutdown", lambda: None)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["ds-flux", *map(str, arguments)])
        capfd.readouterr()
        status = main()
        captured = capfd.readouterr()
        return Done(status, captured.out, captured.err)

    return run
