"""Files that deploy a server name what there is, as far as a machine without containers can tell."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from helix.checks import check
from helix.config import Config, ServeConfig
from launch.cli import COMMANDS
from launch.inputs.compose import composed
from launch.serving.routes import Api
from launch.serving.security import Keys, check_exposure
from tests.e2e.cli import Job
from tests.serving.front import ROOT

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROUTES = {path for path, *_ in Api(ServeConfig(), Keys(None))._routes}
SCRIPTS = sorted(file for file in DEPLOY.iterdir() if file.suffix in (".sh", ".sbatch"))


def served(words: list[str]) -> Config:
    """The config of a server that other hosts reach, with keys."""
    config = composed(words)
    check(config)
    check_exposure(config.serve)
    assert config.serve.host == "0.0.0.0" and config.serve.api_keys is not None and config.model.path is not None
    return config


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions and their arguments."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def test_the_image_serves_what_is_built() -> None:
    found = instructions((DEPLOY / "Dockerfile").read_text())
    stages = [words.split(" AS ")[-1] for name, words in found if name == "FROM"]
    for name, words in found:
        if name == "COPY":
            given = shlex.split(words)
            options, sources = (
                [w for w in given if w.startswith("--")],
                [w for w in given if not w.startswith("--")][:-1],
            )
            of_stage = [option for option in options if option.startswith("--from=")]
            assert all(option.removeprefix("--from=") in stages for option in of_stage)
            assert of_stage or all((ROOT / source).exists() for source in sources), words
    assert {name for name, _ in found} <= {
        "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    last = dict(found)
    assert last["USER"] not in ("root", "0") and f"useradd --create-home --uid=1000 {last['USER']}" in str(found)
    assert f"/wheels/{PROJECT['name'].replace('-', '_')}-*.whl" in str(found)
    assert all(extra in PROJECT["optional-dependencies"] for extra in re.findall(r"\.whl\)\[(\w+)\]", str(found)))
    program, command, *words = json.loads(last["ENTRYPOINT"])
    assert program in PROJECT["scripts"] and command in COMMANDS
    config = served([*words, *json.loads(last["CMD"])])
    assert last["EXPOSE"] == str(config.serve.port)
    probe = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", probe[-1])
    assert url[0] == last["EXPOSE"] and url[1] in ROUTES
    compile(probe[-1], "probe", "exec")
    assert ".venv" in (ROOT / ".dockerignore").read_text()


def test_compose_starts_the_image_and_who_watches_it() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    composition = yaml.safe_load(text)
    services = composition["services"]
    helix = services["helix"]
    assert (DEPLOY / helix["build"]["context"] / helix["build"]["dockerfile"]).exists()
    config = served(["serve.host=0.0.0.0", *helix["command"]])
    assert config.serve.api_keys == "/run/secrets/keys" and helix["secrets"] == ["keys"]
    assert helix["ports"] == [f"{config.serve.port}:{config.serve.port}"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"helix:{config.serve.port}"]
    (secret,) = services["prometheus"]["secrets"]
    assert scraped["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    mounted = [
        volume.split(":") for service in services.values() for volume in service.get("volumes", ()) if "$" not in volume
    ]
    assert all(
        (DEPLOY / source).exists() if source[0] == "." else source in composition["volumes"] for source, *_ in mounted
    )
    used = {secret for service in services.values() for secret in service.get("secrets", ())}
    assert used == composition["secrets"].keys()
    assert {one["source"] for one in services["grafana"]["configs"]} == composition["configs"].keys()
    written = {name: yaml.safe_load(config["content"]) for name, config in composition["configs"].items()}
    (provider,) = written["dashboards"]["providers"]
    assert any(target.startswith(provider["options"]["path"]) for _, target, *_ in mounted)
    assert written["datasources"]["datasources"][0]["url"] == "http://prometheus:9090"
    assert {*re.findall(r"\$\{(\w+):\?", text)} == {"MODEL", "KEYS", "PROMETHEUS_KEY"}
    seconds = int(helix["stop_grace_period"].removesuffix("s"))
    assert seconds > config.serve.drain_s


def test_the_group_of_pods_is_whole() -> None:
    group, service = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    pods: dict[str, Any] = {role: template[f"{role}Template"] for role in ("leader", "worker")}
    commands = []
    for pod in pods.values():
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        program, *words = container["command"]
        assert f"/usr/local/bin/{program}" in (DEPLOY / "Dockerfile").read_text()
        config = served(words)
        assert pod["spec"]["terminationGracePeriodSeconds"] > config.serve.drain_s
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert config.layout.kvp * config.layout.tpa == template["size"] * gpus
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert all(
            any(str(path).startswith(f"{of}/") for of in paths) for path in (config.model.path, config.serve.api_keys)
        )
        commands.append(words)
    assert commands[0] == commands[1], "all nodes of a job have one config"
    (leader,) = pods["leader"]["spec"]["containers"]
    (port,) = leader["ports"]
    assert port["containerPort"] == config.serve.port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[name]["httpGet"]["path"] in ROUTES and leader[name]["httpGet"]["port"] == port["name"]
    assert leader["livenessProbe"]["httpGet"]["path"] == "/livez", "a server that restarts its ranks is alive"
    labels = pods["leader"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= pods["worker"]["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def test_the_unit_starts_what_there_is() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "helix.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    program, command, *words = service["ExecStart"].split()
    assert Path(program).name in PROJECT["scripts"] and command in COMMANDS
    config = served(words)
    name, _, path = service["LoadCredential"].partition(":")
    assert config.serve.api_keys == f"%d/{name}" and path.startswith("/etc/")
    assert int(service["TimeoutStopSec"]) > config.serve.drain_s and service["KillMode"] == "mixed"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_understood(script: Path) -> None:
    """By the shell; their examples by the server, and what they start is there."""
    subprocess.run(["bash", "-n", script], check=True, timeout=10)
    text = script.read_text()
    (example,) = re.findall(r"^#.*deploy/\S+ (model\.path=.*)$", text, re.M)
    served(shlex.split(example))
    for path in re.findall(r"\b(?:deploy|launch)/[\w./]+\.\w+", text):
        assert (ROOT / path).exists()
    for module in re.findall(r"-m ([\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    assert script.suffix == ".sbatch" or script.stat().st_mode & 0o111


def test_slurm_is_told_what_a_node_is() -> None:
    text = (DEPLOY / "serve.sbatch").read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))
    (ranks,) = re.findall(r"\bRANKS=(\d+)", text)
    config = served(re.findall(r"^#.*serve\.sbatch (.*)$", text, re.M)[0].split())
    assert given["ntasks-per-node"] == "1" and ranks == given["gpus-per-node"]
    assert int(given["nodes"]) * int(ranks) == config.layout.kvp * config.layout.tpa


def fake(directory: Path) -> Path:
    """The script beside commands that last as long, and end as, a test wants."""
    (directory / "launch").mkdir()
    (directory / "launch" / "__init__.py").touch()
    for name in ("agent", "cli"):
        (directory / "launch" / f"{name}.py").write_text(
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
            f"print({name!r}, os.environ['NODES'], os.environ['ENDPOINT'], *sys.argv[1:], flush=True)\n"
            f"seconds, code = os.environ.get({name!r}, '60 9').split()\n"
            "time.sleep(float(seconds))\nsys.exit(int(code))\n"
        )
    (directory / "helix.py").write_text(f"ROOT = {str(directory)!r}\n")
    (directory / "deploy").mkdir()
    (script := directory / "deploy" / "node.sh").write_text((DEPLOY / "node.sh").read_text())
    return script


@pytest.mark.parametrize(
    "node, ends, signalled, code, starts",
    [
        (0, {"agent": "0.2 3"}, False, 3, ["agent", "cli"]),
        (0, {"cli": "0.2 0"}, False, 0, ["agent", "cli"]),
        (0, {"cli": "0.2 1"}, False, 1, ["agent", "cli"]),
        (0, {}, True, 0, ["agent", "cli"]),  # the server ends by itself, once told
        (1, {"agent": "0.2 4"}, False, 4, ["agent"]),
        (1, {"agent": "1.5 0"}, True, 0, ["agent"]),  # ranks end when the first node's do
    ],
)
def test_of_a_node_s_processes_one_takes_the_other_along(
    node: int, ends: dict[str, str], signalled: bool, code: int, starts: list[str], tmp_path: Path
) -> None:
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "LWS_WORKER_INDEX": str(node)} | ends
    environment |= {"LWS_LEADER_ADDRESS": "pod-0", "LWS_GROUP_SIZE": "3", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        ["bash", fake(tmp_path), "layout.kvp=2"], env=environment, stdout=subprocess.PIPE, text=True
    )
    begin = time.monotonic()
    if signalled:
        time.sleep(0.7)
        process.terminate()
    said, _ = process.communicate(timeout=20)
    assert process.returncode == code and time.monotonic() - begin < 10
    lines = sorted(line.split() for line in said.splitlines())
    assert [line[0] for line in lines] == starts and all(line[1:3] == ["3", "pod-0:29500"] for line in lines)
    assert lines[0][3] == "layout.kvp=2" and lines[0][4].startswith("serve.socket=")
    if node == 0:
        assert lines[1][3:] == ["serve", "layout.kvp=2", lines[0][4].replace("serve.socket", "serve.attach")]


def test_a_node_says_what_it_lacks(tmp_path: Path) -> None:
    for environment, words in (({}, "set ENDPOINT=HOST:PORT"), ({"ENDPOINT": "x:1"}, "set NODE, the number")):
        ended = subprocess.run(
            ["bash", DEPLOY / "node.sh"], env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True, text=True,
            timeout=10,
        )  # fmt: skip
        assert ended.returncode == 1 and words in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_nodes_serve_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host: the first answers, and told to end both end."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        meeting, port = probe.getsockname()[1], other.getsockname()[1]
    for name, value in (
        ("ENDPOINT", f"127.0.0.1:{meeting}"),
        ("NODES", "2"),
        ("RANKS", "1"),
        ("PYTHON", sys.executable),
    ):
        monkeypatch.setenv(name, value)
    words = ["layout.kvp=2", "kv.tokens=8192", "decode.max_batch=4", f"serve.port={port}"]
    nodes = []
    for node in range(2):
        monkeypatch.setenv("NODE", str(node))
        nodes.append(Job(["bash", "deploy/node.sh"], *words, log=tmp_path / f"node{node}"))
    try:
        nodes[0].wait_for(nodes[0].log, "is served at", 150)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps({"prompt": "def f", "max_tokens": 3}).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        nodes[0].process.terminate()
        ended = [node.wait(60).code for node in nodes]
        assert ended[0] == 0, nodes[0].log.read_text()
    finally:
        for one in nodes:
            one.kill()
