"""What is deployed, read as those read it that run it: the image, the manifests, Ray's configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from outrider.cli.serve import serve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = (ROOT / "Dockerfile", DEPLOY / "ray.Dockerfile")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Of an image, in their order."""
    text = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def served(*arguments: str) -> dict[str, Any]:
    """What ``outrider serve`` makes of arguments."""
    return serve.make_context("serve", list(arguments)).params


def valid(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def kubernetes(kind: str) -> dict[str, Any]:
    [found] = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one["kind"] == kind]
    return found


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_images_have_extras_that_there_are(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    named = re.findall(r"EXTRAS=([\w,]+)", text) or re.findall(r"/source\[([\w,]+)\]", text)
    assert set(named[0].split(",")) <= set(metadata("outrider").get_all("Provides-Extra"))


def test_the_image_gets_all_packages() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/py.typed")}
    copied = {rest.split()[-1] for name, rest in instructions(DOCKERFILES[0]) if name == "COPY"}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert folders <= copied & sent
    assert {"pyproject.toml", "README.md", "LICENSE"} <= sent


def test_the_image_serves() -> None:
    """As no user that there is, without a shell that would keep SIGTERM to itself, at the port that it names."""
    last = dict(instructions(DOCKERFILES[0]))
    assert last["USER"] == "10001:10001"
    program, command, *arguments = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert (program, command) == ("outrider", "serve")
    given = served(*arguments)
    assert (given["bundle"], given["host"], given["port"]) == (Path("/bundle"), "0.0.0.0", int(last["EXPOSE"]))
    assert f":{given['port']}/health" in last["HEALTHCHECK"]


def test_kubernetes() -> None:
    """By Kubernetes' own schemas; and what its parts say of each other."""
    deployment, service = kubernetes("Deployment"), kubernetes("Service")
    valid(deployment)
    valid(service)
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels
    assert service["spec"]["selector"].items() <= labels
    [container] = template["spec"]["containers"]
    given = served(*container["args"])
    [port] = container["ports"]
    assert (given["host"], given["port"]) == ("0.0.0.0", port["containerPort"])
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    [mount] = container["volumeMounts"]
    assert Path(mount["mountPath"]) == given["bundle"]
    assert given["threads"] == int(container["resources"]["requests"]["cpu"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert template["spec"]["terminationGracePeriodSeconds"] > pause + given["timeout"]
    assert container["env"][0]["name"] == "OUTRIDER_API_KEY"


def groups(service: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def test_kuberay() -> None:
    """Pods by Kubernetes' schemas, the rest by what ``RayService`` of ray.io/v1 has; a pod has room for a replica."""
    service = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["spec"].keys() == {"serveConfigV2", "rayClusterConfig"}
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert config == yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    arguments = config["applications"][0]["args"]
    cluster = service["spec"]["rayClusterConfig"]
    fields = {"rayVersion", "enableInTreeAutoscaling", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    assert cluster.keys() == fields
    [workers] = cluster["workerGroupSpecs"]
    for group in groups(service):
        assert group.keys() <= {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]})
        [container] = group["template"]["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
        assert "OUTRIDER_API_KEY" in environment
    [container] = workers["template"]["spec"]["containers"]
    processors = {container["resources"]["limits"]["cpu"], workers["rayStartParams"]["num-cpus"]}
    assert processors == {str(arguments["threads"])}
    assert container["volumeMounts"][0]["mountPath"] == arguments["bundle"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (arguments["min_replicas"], arguments["max_replicas"])
    image, version = dict(instructions(DOCKERFILES[1]))["FROM"].split(":")
    assert (image, version) == ("rayproject/ray", cluster["rayVersion"])
