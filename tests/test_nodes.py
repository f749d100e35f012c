"""Two nodes for real: ssh, pdsh, the hostfile; checkpoints on a disk that they share, and on disks of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ds_flux.consolidate import main as consolidate
from tests.conftest import Assets
from tests.distributed import metrics
from tests.nodes import Nodes, NoNodesError, two_nodes

ODD = "it's 100% of $HOME; *"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    try:
        with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
            yield nodes
    except NoNodesError as reason:
        pytest.skip(f"two nodes cannot be made here: {reason}")


def recipe(assets: Assets, output_dir: Path, folder: Path, **changes: object) -> tuple[str, str]:
    """A YAML file of a run of four steps with a checkpoint in its middle, and its DeepSpeed JSON."""
    words = assets.flags(output_dir, train_batch_size=2, max_train_steps=4, checkpointing_steps=2, **changes)
    settings = {name[2:]: value if value == "no" else yaml.safe_load(value) for name, value in zip(words[::2], words[1::2])}
    path = folder / f"{output_dir.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path), settings["deepspeed_config"]


def multi_node(nodes: Nodes, *words: str, **variables: str) -> str:
    """Run launch/multi_node.sh on node 1; its output."""
    done = nodes.run(["bash", "launch/multi_node.sh", str(nodes.hostfile), *words], **variables)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def test_a_run_on_a_shared_disk(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """Trains on both, with words that a shell would change; its checkpoint goes on in one process, and is consolidated."""
    words = recipe(assets, tmp_path / "out", tmp_path)
    output = multi_node(nodes, *words, "--caption_prefix", ODD, "--instance_prompt=x;y")
    assert "on 4 processes" in output
    for node in nodes.hosts:
        assert f"{node}:" in output
    settings = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert (settings["caption_prefix"], settings["instance_prompt"]) == (ODD, "x;y")
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert consolidate([str(tmp_path / "out"), str(tmp_path / "transformer")]) == 0
