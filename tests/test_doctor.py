"""`ds-flux doctor`: two nodes that are fit, and every line that says what is wrong with one."""

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_flux import findings, probe, travel
from ds_flux.nodes import Answer, Asker
from tests.conftest import Assets, Done
from tests.distributed import ROOT
from tests.nodes import PATH, Nodes, space


def test_two_nodes_that_are_fit(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """Kernels are built for a JSON with offload, and an all-reduce runs over all four processes."""
    flags = ["--output_dir", str(tmp_path), "--deepspeed_config", assets.ds_config(3, offload=True)]
    model = ["--pretrained_model_name_or_path", str(assets.model)]
    done = nodes.run(["ds-flux", "doctor", "--hostfile", str(nodes.hostfile), *flags, *model])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {"ok"}
    words = " ".join(done.stdout.split())
    for expected in (
        "reachable node1, node2 by ssh",
        "for 4 slots",
        "kernels node1, node2 cpu_adam built",
        "4 processes, ",
        "is shared by all nodes",
    ):
        assert expected in words, expected


FAILING = {  # what is wrong: (node, words of its line)
    "a node is down": ("down", "No route to host; down is down or not in this network"),
    "ssh is refused": ("refused", "nothing listens for ssh there"),
    "no key": ("denied", "ssh-copy-id denied"),
    "no such name": ("nowhere", "is no name that is known here"),
    "a slot too many": ("node2", "slots=99, and it has"),
    "a port is taken": ("node1", "give deepspeed another --master_port"),
    "no space": ("node2", "are free for --output_dir"),
    "other code": ("node2", "are not those of node1: bring both to one commit"),
    "an unequal model": ("node2", "model/transformer/config.json is another one than on node1: rsync"),
    "no network": ("node1, node2, down, refused, denied, nowhere", "not tried; mend the lines above first"),
}


@pytest.fixture(scope="module")
def failing(assets: Assets, nodes: Nodes) -> list[str]:
    """What doctor says where all of that is wrong at once."""
    code, model, hostfile = nodes.disk / "code", nodes.disk / "model", nodes.folder / "failing"
    slots = {"node1": 1, "node2": 99, "down": 1, "refused": 1, "denied": 1, "nowhere": 1}
    hostfile.write_text("".join(f"{name} slots={number}\n" for name, number in slots.items()))
    for node in nodes.hosts:
        copies = f"mkdir {code} && cp -r {ROOT}/ds_flux {ROOT}/ds_configs {code} && cp -r {assets.model} {model}"
        assert nodes.run(["sh", "-c", copies], node).returncode == 0
    spoil = f"echo '# changed' >>{code}/ds_flux/flow.py && sed -i s/1/2/ {model}/transformer/config.json"
    assert nodes.run(["sh", "-c", spoil], "node2").returncode == 0
    listening = (
        "import socket, time; s = socket.socket(); s.bind(('', 29511)); s.listen(); print('yes', flush=True); time.sleep(99)"
    )
    command = ["ip", "netns", "exec", space("node1"), sys.executable, "-c", listening]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PATH": PATH}) as listener:
        assert listener.stdout.readline() == b"yes\n"
        flags = ["--hostfile", hostfile, "--master_port", 29511, "--output_dir", nodes.folder / "full/out"]
        words = ["python", "-m", "ds_flux", "doctor", *flags, "--pretrained_model_name_or_path", model]
        began_s = time.monotonic()
        done = nodes.run(list(map(str, words)), cwd=code, PYTHONPATH=str(code))
        taken_s = time.monotonic() - began_s
        listener.terminate()
    assert done.returncode == 2 and taken_s < 60, done.stdout + done.stderr
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("what", FAILING)
def test_each_failing_line(failing: list[str], what: str) -> None:
    node, words = FAILING[what]
    said = [line for line in failing if line.startswith("FAIL") and words in line and f" {node} " in line]
    assert len(said) == 1, "\n".join(failing)


def test_what_is_fine_is_said_beside_what_fails(failing: list[str]) -> None:
    assert any(line.startswith("ok torch node1, node2 ") for line in failing)
    assert any(line.startswith("ok accelerators node1 ") for line in failing)


@pytest.fixture(scope="module")
def two() -> findings.Facts:
    """This machine twice, as it is."""
    here = probe.facts({"output_dir": "out", "models": [], "master_port": None})
    return {"node1": here, "node2": copy.deepcopy(here)}


def only_failing(facts: findings.Facts) -> str:
    """The one line of node2 that fails."""
    found = findings.compared(facts, dict.fromkeys(facts, 1), "out", 29500)
    (line,) = [one for one in found if not one.is_fine]
    assert line.where == "node2"
    return f"{line.what}: {line.words}"


def changed(facts: findings.Facts, *keys: str, to: Any) -> findings.Facts:
    facts = copy.deepcopy(facts)
    inner: Any = facts["node2"]
    for key in keys[:-1]:
        inner = inner[key]
    assert keys[-1] in inner
    inner[keys[-1]] = to
    return facts


@pytest.mark.parametrize("package", ["python", "torch", "deepspeed", "diffusers"])
def test_another_version(two: findings.Facts, package: str) -> None:
    ours = two["node1"]["versions"][package]
    assert only_failing(changed(two, "versions", package, to="1.2")) == (
        f"{package}: 1.2, and node1 has {ours}: install the same on both"
    )
    assert f"{package} is not installed" in only_failing(changed(two, "versions", package, to=None))


def test_what_else_a_node_may_lack(two: findings.Facts) -> None:
    assert all(one.is_fine for one in findings.compared(two, dict.fromkeys(two, 1), "out", 29500))
    assert "end what else runs there" in only_failing(changed(two, "memory_gib", to=0.5))
    assert "g++ not found" in only_failing(changed(two, "compiler", to=None))
    assert "DeepSpeed finds none: no driver" in only_failing(changed(two, "accelerator", "error", to="no driver"))
    assert "Read-only" in only_failing(changed(two, "disk", "error", to="Read-only file system"))


def test_a_folder_that_is_not_what_the_json_says() -> None:
    answer = Answer({"num": 4, "seconds": 0.1, "gb_per_s": 0.25, "is_shared": False}, None)
    assert [one.is_fine for one in findings.connected("node1, node2", answer, 4, "out", is_local=True)] == [True, True]
    _, line = findings.connected("node1, node2", answer, 4, "out", is_local=False)
    assert not line.is_fine and "out is another folder on each node: name one on a shared disk" in line.words
    line, _ = findings.connected("node1, node2", answer, 5, "out", is_local=True)
    assert not line.is_fine and "the hostfile has 5 slots" in line.words


@pytest.mark.parametrize("ahead_s, words", [(90.0, "90 s ahead of"), (-7.0, "7 s behind"), (4.0, None)])
def test_a_clock_that_is_wrong(ahead_s: float, words: str | None) -> None:
    found = findings.reached({"node1": Answer((0.0, 0.1), None), "node2": Answer((ahead_s, 0.1), None)})
    wrong = [f"{one.where}: {one.words}" for one in found if not one.is_fine]
    assert wrong == ([f"node2: its clock is {words} this machine's: set it, or start ntp or chrony there"] if words else [])


def test_a_kernel_that_does_not_build(tmp_path: Path) -> None:
    """No compiler that works; and one that waits for a lock that nobody will take away."""
    variables = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    broken = Asker({**variables, "CXX": "/bin/false"}).probe(None, "ops", ["cpu_adam"], 60)
    (line,) = findings.built({"node1": broken})
    assert not line.is_fine and line.words.startswith("cpu_adam: ")
    (tmp_path / "cpu_adam/lock").touch()
    (line,) = findings.built({"node1": Asker(variables).probe(None, "ops", ["cpu_adam"], 10)})
    assert not line.is_fine and line.words.startswith(
        "no answer in 10 s; if nothing compiles there, a killed build left a lock"
    )


def test_this_machine_alone(assets: Assets, run_main: Callable[..., Done], tmp_path: Path) -> None:
    done = run_main("doctor", "--output_dir", tmp_path, "--pretrained_model_name_or_path", assets.model)
    assert done.status == 0 and "FAIL" not in done.output, done.output
    assert "this machine" in done.output and f"{assets.model}, " in done.output
    done = run_main("doctor", "--output_dir", tmp_path, "--pretrained_model_name_or_path", "nobody/nothing")
    assert done.status == 2 and "hf download nobody/nothing" in done.output


HOSTFILES = {
    "node1 slots=2\nnode2 slot=2\n": "line 2: expected `NAME slots=NUMBER`, got `node2 slot=2`",
    "node1\n": "line 1: expected `NAME slots=NUMBER`, got `node1`",
    "node1 slots=2 node2 slots=2\n": "line 1: expected",
    "node1 slots=8gpus\n": "line 1: expected",
    "# mine\n\nnode1 slots=2\nnode1 slots=2  # again\n": "line 4: node1 is there already",
    "node1 slots=0\n": "line 1: node1 has no slots",
    "# none\n": "names no node",
    None: "no such file",
}


@pytest.mark.parametrize("text", HOSTFILES)
def test_a_malformed_hostfile(text: str | None, run_main: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    if text is not None:
        path.write_text(text)
    done = run_main("doctor", "--hostfile", path)
    assert done.status == 2 and done.errors.startswith(f"ds-flux: error: hostfile {path}")
    assert HOSTFILES[text] in done.errors and done.errors.count("\n") == 1 and done.output == ""


def test_variables_that_travel(tmp_path: Path) -> None:
    here = {"HF_HOME": "/hf", "HF_TOKEN": "secret", "NCCL_DEBUG": "INFO", "EDITOR": "vi", "OMP_NUM_THREADS": "1"}
    (tmp_path / ".deepspeed_env").write_text("# ours\n\nEDITOR=ed\nOMP_NUM_THREADS=4\n")
    assert travel.variables(here, [tmp_path]) == {
        "HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "EDITOR": "ed"
    }  # fmt: skip
    (tmp_path / ".deepspeed_env").write_text("A=1\nexport B=2\n")
    with pytest.raises(Exception, match=r"line 2: expected NAME=value, got `export B=2`"):
        travel.variables(here, [tmp_path])
