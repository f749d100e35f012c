"""Ask the nodes of a hostfile: is there an answer by ssh, what does `ds_flux.probe` say, how fast is the network between them.

Nodes are asked in parallel, and every question has a time limit.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_flux.travel import word_for_pdsh

CONNECT_S, FACTS_S, OPS_S, NETWORK_S = 8, 35, 300, 150
"""time limits in s; of the first two together less than a minute, so that a node that is down is told of by then"""
MARK = "ds_flux.probe: "
OUT_OF_TIME = 124  # the exit status of coreutils' timeout


@dataclass(frozen=True)
class Answer:
    """What came of a question."""

    value: Any
    error: str | None
    """why there is no value"""


@dataclass(frozen=True)
class Asker:
    """How questions are put."""

    variables: dict[str, str]
    """the environment they are answered in"""
    ssh_port: int | None = None
    python: str = sys.executable

    def ask_all(self, hosts: Iterable[str | None], question: Callable[[str | None], Answer]) -> dict[str | None, Answer]:
        """One question to several nodes at once; None is this machine, without ssh."""
        hosts = list(hosts)
        with ThreadPoolExecutor(max(1, len(hosts))) as pool:
            return dict(zip(hosts, pool.map(question, hosts)))

    def ssh(self, host: str | None, line: str) -> list[str]:
        """A command that runs a line of shell on a node."""
        if host is None:
            return ["sh", "-c", line]
        port = [] if self.ssh_port is None else ["-p", str(self.ssh_port)]
        return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *port, host, line]

    def reach(self, host: str | None) -> Answer:
        """How far ahead a node's clock is, as (s, uncertainty in s)."""
        began_s = time.time()
        done = run(self.ssh(host, "date +%s.%N"), 2 * CONNECT_S)
        ended_s = time.time()
        try:
            there_s = float(done.stdout)
        except ValueError:
            return Answer(None, last_line(done.stderr) or f"ssh ended with status {done.returncode}")
        return Answer((there_s - (began_s + ended_s) / 2, (ended_s - began_s) / 2), None)

    def probe(self, host: str | None, action: str, argument: Any, limit_s: int) -> Answer:
        """What `python -m ds_flux.probe` says on a node, in the working folder of here and with the python of here."""
        words = [f"{name}={value}" for name, value in self.variables.items()]
        python = ["timeout", str(limit_s), self.python, "-m", "ds_flux.probe", action, json.dumps(argument)]
        done = run(
            self.ssh(host, f"cd {shlex.quote(str(Path.cwd()))} && env {shlex.join([*words, *python])}"), limit_s + CONNECT_S
        )
        if done.returncode == OUT_OF_TIME:
            return Answer(None, f"no answer in {limit_s} s")
        return answer_in(done)

    def network(self, hostfile: Path, master_port: int, request: dict[str, Any]) -> Answer:
        """What an all-reduce over the processes of all nodes takes, started as a run would be."""
        if shutil.which("pdsh") is None:
            return Answer(None, "pdsh is not installed here")
        port = [] if self.ssh_port is None else ["--ssh_port", str(self.ssh_port)]
        launcher = [self.python, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--force_multi", *port]
        module = ["--no_local_rank", "--module", "ds_flux.probe", "network", word_for_pdsh(json.dumps(request))]
        with tempfile.NamedTemporaryFile("w", prefix="deepspeed_env") as file:
            file.write("".join(f"{name}={value}\n" for name, value in self.variables.items()))
            file.flush()
            command = [*launcher, "--master_port", str(master_port), *module]
            done = run(command, NETWORK_S, {**os.environ, "DS_ENV_FILE": file.name})
        return Answer(None, f"no end in {NETWORK_S} s") if done.returncode == OUT_OF_TIME else answer_in(done)


def run(command: list[str], limit_s: float, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """A command's end; it is asked to end when its time is over, as a launcher ends what it has started elsewhere."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            out, errors, status = "", "", OUT_OF_TIME
    return subprocess.CompletedProcess(command, status, out, errors)


def answer_in(done: subprocess.CompletedProcess) -> Answer:
    """The marked line of a probe's output, whatever else is there (pdsh puts the host's name before it)."""
    for line in done.stdout.splitlines():
        if MARK in line:
            return Answer(json.loads(line.partition(MARK)[2]), None)
    return Answer(None, last_line(done.stderr) or f"it ended with status {done.returncode}")


def last_line(text: str) -> str:
    """What a program says last, but for what pdsh says of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("pdsh@")]
    return lines[-1] if lines else ""
