"""Files that deploy a server name what there is, as far as a machine without containers can tell."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from helix.checks import check
from helix.config import Config, ServeConfig
from launch.cli import COMMANDS
from launch.inputs.compose import compose_config
from launch.serving.routes import Api
from launch.serving.security import ApiKeys, check_exposure
from tests.serving.api_server import ROOT

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROUTES = {path for path, *_ in Api(ServeConfig(), ApiKeys(None))._routes}
SCRIPTS = sorted(file for file in DEPLOY.iterdir() if file.suffix in (".sh", ".sbatch"))
SCRAPED = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def served(words: list[str]) -> Config:
    """The config of a server that other hosts reach, with keys."""
    config = compose_config(words)
    check(config)
    check_exposure(config.serve)
    assert config.serve.host == "0.0.0.0" and config.serve.api_keys is not None and config.model.path is not None
    return config


def test_the_image_serves_what_is_built() -> None:
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
    found = [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]
    stages = [words.split(" AS ")[-1] for name, words in found if name == "FROM"]
    for words in (shlex.split(words) for name, words in found if name == "COPY"):
        source_stages = [word.removeprefix("--from=") for word in words if word.startswith("--from=")]
        assert {*source_stages} <= {*stages}
        assert source_stages or all((ROOT / word).exists() for word in words[:-1] if not word.startswith("--")), words
    assert {name for name, _ in found} <= {
        "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    last = dict(found)
    assert last["USER"] not in ("root", "0") and f"useradd --create-home --uid=1000 {last['USER']}" in joined
    assert f"/wheels/{PROJECT['name'].replace('-', '_')}-*.whl" in joined
    assert {*re.findall(r"\.whl\)\[(\w+)\]", joined)} <= PROJECT["optional-dependencies"].keys()
    program, command, *words = json.loads(last["ENTRYPOINT"])
    assert program in PROJECT["scripts"] and command in COMMANDS
    config = served([*words, *json.loads(last["CMD"])])
    assert last["EXPOSE"] == str(config.serve.port)
    probe = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])[-1]
    ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", probe)
    assert port == last["EXPOSE"] and path in ROUTES
    compile(probe, "probe", "exec")
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
    assert int(helix["stop_grace_period"].removesuffix("s")) > config.serve.drain_s
    assert SCRAPED["metrics_path"] == "/metrics" and SCRAPED["authorization"]["type"] == "Bearer"
    assert SCRAPED["static_configs"] == [{"targets": [f"helix:{config.serve.port}"]}]
    (secret,) = services["prometheus"]["secrets"]
    assert SCRAPED["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    volumes = [volume for service in services.values() for volume in service.get("volumes", ()) if "$" not in volume]
    mounted = dict(volume.split(":")[:2] for volume in volumes)
    assert all((DEPLOY / source).exists() for source in mounted if source[0] == ".")
    assert {source for source in mounted if source[0] != "."} <= composition["volumes"].keys()
    used = {secret for service in services.values() for secret in service.get("secrets", ())}
    assert used == composition["secrets"].keys()
    assert {one["source"] for one in services["grafana"]["configs"]} == composition["configs"].keys()
    written = {name: yaml.safe_load(config["content"]) for name, config in composition["configs"].items()}
    (provider,) = written["dashboards"]["providers"]
    assert any(target.startswith(provider["options"]["path"]) for target in mounted.values())
    assert written["datasources"]["datasources"][0]["url"] == "http://prometheus:9090"
    assert {*re.findall(r"\$\{(\w+):\?", text)} == {"MODEL", "KEYS", "PROMETHEUS_KEY"}


def test_the_group_of_pods_is_whole() -> None:
    group, service = yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    (leader,), (worker,) = (pod["spec"]["containers"] for pod in pods)
    for pod, container in zip(pods, (leader, worker), strict=True):
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        program, *words = container["command"]
        assert f"/usr/local/bin/{program}" in DOCKERFILE
        config = served(words)
        assert pod["spec"]["terminationGracePeriodSeconds"] > config.serve.drain_s
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert config.layout.kvp * config.layout.tpa == template["size"] * gpus
        for path in (config.model.path, config.serve.api_keys):
            assert any(str(path).startswith(f"{mount['mountPath']}/") for mount in mounts)
    assert leader["command"] == worker["command"], "all nodes of a job have one config"
    (port,) = leader["ports"]
    assert port["containerPort"] == config.serve.port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[name]["httpGet"]["path"] in ROUTES and leader[name]["httpGet"]["port"] == port["name"]
    assert leader["livenessProbe"]["httpGet"]["path"] == "/livez", "a server that restarts its ranks is alive"
    leader_labels, worker_labels = (pod["metadata"]["labels"].items() for pod in pods)
    selector = service["spec"]["selector"].items()
    assert selector <= leader_labels and not selector <= worker_labels
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
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    (example,) = re.findall(r"^#.*deploy/\S+ (model\.path=.*)$", text, re.M)
    config = served(shlex.split(example))
    for path in re.findall(r"\b(?:deploy|launch)/[\w./]+\.\w+", text):
        assert (ROOT / path).exists()
    for module in re.findall(r"-m ([\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    if script.suffix != ".sbatch":
        assert script.stat().st_mode & 0o111
        return
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.M))  # Slurm is told what a node is
    (ranks,) = re.findall(r"\bRANKS=(\d+)", text)
    assert given["ntasks-per-node"] == "1" and ranks == given["gpus-per-node"]
    assert int(given["nodes"]) * int(ranks) == config.layout.kvp * config.layout.tpa


# In place of the agent and of the server: each says how it was started, and ends as a test wants once it reads a line.
FAKE = """\
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print({name!r}, os.environ['NODES'], os.environ['ENDPOINT'], *sys.argv[1:], flush=True)
with open(os.environ.get({name!r}, 'never')) as line:
    sys.exit(int(line.read()))
"""


@pytest.mark.parametrize(
    "node, ends, code, starts",
    [
        (0, ("agent", 3), 3, ["agent", "cli"]),
        (0, ("cli", 0), 0, ["agent", "cli"]),
        (0, ("cli", 1), 1, ["agent", "cli"]),
        (0, None, 0, ["agent", "cli"]),  # the server ends by itself, once told
        (1, ("agent", 4), 4, ["agent"]),
        (1, ("agent", 0), 0, ["agent"]),  # ranks end when the first node's do, and not with a signal
    ],
)
def test_of_a_node_s_processes_one_takes_the_other_along(
    node: int, ends: tuple[str, int] | None, code: int, starts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").touch()
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "LWS_WORKER_INDEX": str(node)}
    environment |= {"LWS_LEADER_ADDRESS": "pod-0", "LWS_GROUP_SIZE": "3", "TMPDIR": str(tmp_path)}
    for name in ("agent", "cli"):
        (tmp_path / "launch" / f"{name}.py").write_text(FAKE.format(name=name))
        os.mkfifo(tmp_path / name)
        environment[name] = str(tmp_path / name)
    (tmp_path / "helix.py").write_text(f"ROOT = {str(tmp_path)!r}\n")
    (tmp_path / "deploy").mkdir()
    (script := tmp_path / "deploy" / "node.sh").write_text((DEPLOY / "node.sh").read_text())
    process = subprocess.Popen(["bash", script, "layout.kvp=2"], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().split() for _ in starts)
    if ends is None or node == 1:
        process.terminate()
    if ends is not None:
        (tmp_path / ends[0]).write_text(str(ends[1]))
    assert process.wait(60) == code and process.stdout.read() == ""
    assert [line[0] for line in lines] == starts and all(line[1:3] == ["3", "pod-0:29500"] for line in lines)
    assert lines[0][3] == "layout.kvp=2" and lines[0][4].startswith("serve.socket=")
    assert not Path(lines[0][4].partition("=")[2]).parent.exists(), "the socket's directory is removed"
    if node == 0:
        assert lines[1][3:] == ["serve", "layout.kvp=2", lines[0][4].replace("serve.socket", "serve.attach")]


@pytest.mark.parametrize(
    "given, words", [({}, "set ENDPOINT=HOST:PORT"), ({"ENDPOINT": "x:1"}, "set NODE, the number")]
)
def test_a_node_says_what_it_lacks(given: dict[str, str], words: str) -> None:
    environment = {"PATH": "/usr/bin:/bin"} | given
    ended = subprocess.run(["bash", DEPLOY / "node.sh"], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and words in ended.stderr
