"""The files in deploy/: what can be seen without a cluster. Every command in them is one that ringtmp and torchrun accept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ringtmp import cli
from ringtmp.errors import UsageError
from ringtmp.launch import device_names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMAND = re.compile(r"^ *command: (\[.*\])$", re.MULTILINE)
#: What the cluster puts in the place of a variable.
GIVEN = {"$(HOST)": "192.0.2.1", "$(POD)": "ringtmp-node-0", "@${CREDENTIALS_DIRECTORY}/token": "@/run/token"}
#: Stand for Slurm: the first machine of the job, and the command that would start on each.
SCONTROL = '#!/bin/sh\ntest "$*" = "show hostnames two[1-2]" && printf "two1\\ntwo2\\n"\n'
SRUN = '#!/bin/sh\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\n'


def accepted(words: list[str]) -> dict[str, Any]:
    """The options as ringtmp reads them; raises what a person would be told."""
    words = [GIVEN.get(each, each) for each in words]
    if Path(words[0]).name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(words[1:])
        assert given.module
        words = [given.training_script, *given.training_script_args]
    assert Path(words[0]).name == "ringtmp"
    with click.Context(cli.ringtmp) as context:
        name, verb, rest = cli.ringtmp.resolve_command(context, words[1:])
        assert verb is not None
        return dict(verb.make_context(name, rest, parent=context).params)


def commands(file: str) -> list[dict[str, Any]]:
    return [accepted(json.loads(each)) for each in COMMAND.findall((DEPLOY / file).read_text())]


def test_a_command_that_does_not_exist_would_be_seen() -> None:
    with pytest.raises(UsageError, match="--nods"):
        accepted(["ringtmp", "train", "--nods", "4"])
    with pytest.raises(UsageError, match="--nods"):
        accepted(["torchrun", "-m", "ringtmp", "train", "--nods", "4"])


def test_pods_are_started_with_commands_that_ringtmp_accepts() -> None:
    master, node = commands("kubernetes/ring.yaml")
    assert (master["listen"], master["nodes"]) == ("192.0.2.1", 4)
    assert device_names.checked_name("device", node["name"]) == "ringtmp-node-0"
    (rank,) = commands("kubernetes/pytorchjob.yaml")
    assert str(rank["run_dir"]) == "/runs/first"
    assert rank["nodes"] is None


def test_the_manifests_hold_together() -> None:
    ring = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes/ring.yaml").read_text())}
    nodes, master = ring["StatefulSet"], ring["Job"]["spec"]["template"]["spec"]
    assert nodes["spec"]["serviceName"] == ring["Service"]["metadata"]["name"]
    assert nodes["spec"]["selector"]["matchLabels"] == nodes["spec"]["template"]["metadata"]["labels"]
    assert ring["Service"]["spec"]["selector"] == nodes["spec"]["selector"]["matchLabels"]
    words = master["containers"][0]["command"]
    assert int(words[words.index("--nodes") + 1]) == nodes["spec"]["replicas"] + 1, "the master counts"
    assert master["hostNetwork"], "its address must be one of its own, and stay the same"
    claims = {each["metadata"]["name"] for each in nodes["spec"]["volumeClaimTemplates"]}
    for pod, volumes in ((nodes["spec"]["template"]["spec"], claims), (master, {"work"})):
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        assert {each["name"] for each in container["env"]} >= {"RINGTMP_CONFIG"}, "who it is must outlive the pod"
    secrets = [
        each["valueFrom"] for each in nodes["spec"]["template"]["spec"]["containers"][0]["env"] if "valueFrom" in each
    ]
    assert {"secretKeyRef": {"name": "ringtmp-token", "key": "token"}} in secrets
    job, claim = yaml.safe_load_all((DEPLOY / "kubernetes/pytorchjob.yaml").read_text())
    workers, elastic = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == workers["replicas"]
    pod = workers["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_job_starts_torchrun_on_every_node_and_resumes_after_a_requeue(tmp_path: Path) -> None:
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": "two[1-2]",
        "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip

    def started() -> tuple[str, list[str]]:
        done = subprocess.run(
            ["bash", DEPLOY / "slurm.sbatch", "--steps", "50"], env=environment, capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
        threads, *words = done.stdout.splitlines()
        return threads, words

    threads, words = started()
    run = tmp_path / "runs/slurm-71"
    first = accepted(words)
    assert (threads, str(first["run_dir"]), first["steps"], first["resume"]) == ("4", str(run), 50, None)
    assert "two1:29500" in words
    run.mkdir(parents=True)
    (run / "config.json").touch()
    again = accepted(started()[1])
    assert (str(again["resume"]), again["run_dir"]) == (str(run), None)


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("ringtmp-node.service", {"join": "@/run/token"}),
        ("ringtmp-train.service", {"supervised": True, "silent_after": 600.0, "listen": "192.0.2.1", "resume": None}),
    ],
)
def test_the_unit_runs_what_ringtmp_accepts_and_systemd_takes_it(
    file: str, given: dict[str, Any], tmp_path: Path
) -> None:
    text = (DEPLOY / file).read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    options = accepted(line.split())
    assert {name: options[name] for name in given} == given
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / file
    unit.write_text(text.replace(line.split()[0], "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_image_is_made_of_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert set(copied) >= {"pyproject.toml", "constraints.txt", "src"}
    assert all((ROOT / each).exists() for each in copied)
    for line in text.replace("\\\n", " ").splitlines():
        assert not line or line.split()[0] in ("#", "FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR", "ENV", "CMD"), line
    assert "-c /src/constraints.txt" in text, "every way to set it up installs the same versions"
