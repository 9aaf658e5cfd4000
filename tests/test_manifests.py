"""deploy/kubernetes: the manifests name probes, metrics and flags that the server has, and each other's objects."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "kubernetes"
ROUTERS = runpy.run_path(str(ROOT / "scripts/check_routers.py"))
READ_BY_LLM_D = {
    "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:lora_requests_info",
}  # fmt: skip
"""What its endpoint picker reads of a model server (gateway-api-inference-extension, proposal 003)."""


def objects(name: str) -> dict[str, Any]:
    """The objects of a manifest by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def container(name: str, kind: str) -> Any:
    (found,) = objects(name)[kind]["spec"]["template"]["spec"]["containers"]
    return found


def server_args() -> list[str]:
    """As Kubernetes passes them on, with the variables of the pod."""
    values = {
        one["name"]: one.get("value", "10.0.0.1") for one in container("server.yaml", "StatefulSet")["env"]
    }
    found = container("server.yaml", "StatefulSet")["args"]
    return [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in found]


def test_the_server_takes_the_flags() -> None:
    words = ["openinfer", *("demo/qwen3" if word == "/models/model" else word for word in server_args())]
    done = subprocess.run([sys.executable, str(ROOT / "tests/parse_commands.py")], cwd=ROOT, text=True, check=True,
                          input=json.dumps([[words, str(ROOT)]]), capture_output=True)  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [""]
    pod = objects("server.yaml")["StatefulSet"]["spec"]["template"]["spec"]
    drain = int(words[words.index("--shutdown-timeout") + 1])
    assert drain < pod["terminationGracePeriodSeconds"]


def test_the_server_has_the_probes_and_metrics(server: Any) -> None:
    config = json.loads(server_args()[-1]) | {"endpoint": "ipc:///tmp/openinfer-manifest-events"}
    one = server(ROOT / "demo" / "qwen3", "--kv-events-config", json.dumps(config), "--enable-lora")
    pod = container("server.yaml", "StatefulSet")
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert ports[pod[probe]["httpGet"]["port"]] == 8000
        assert httpx.get(one.url + pod[probe]["httpGet"]["path"]).status_code == 200
    notes = objects("server.yaml")["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    names = set(re.findall(r"^([\w:]+)[{ ]", httpx.get(one.url + notes["prometheus.io/path"]).text, re.M))
    assert names >= READ_BY_LLM_D
    router = container("vllm-router.yaml", "Deployment")
    assert httpx.get(one.url + router["readinessProbe"]["httpGet"]["path"]).status_code == 200
    assert one.stop() == 0


def test_the_routers_are_those_that_are_tested_and_name_the_servers() -> None:
    (service, pods) = (objects("server.yaml")[kind] for kind in ("Service", "StatefulSet"))
    port = int(config["endpoint"].rpartition(":")[2]) if (config := json.loads(server_args()[-1])) else 0
    assert {one["name"]: one["port"] for one in service["spec"]["ports"]} == {"http": 8000, "kv-events": port}
    hosts = {
        f"{pods['metadata']['name']}-{n}.{pods['spec']['serviceName']}"
        for n in range(pods["spec"]["replicas"])
    }
    for name, packages in (("vllm-router.yaml", ROUTERS["PACKAGES"][:1]),
                           ("dynamo.yaml", (*ROUTERS["PACKAGES"][1:], ROUTERS["BARE"]))):  # fmt: skip
        (text,) = container(name, "Deployment")["args"]
        assert {word for word in shlex.split(text) if "==" in word} == set(packages)
        assert set(re.findall(r"tcp://([\w.-]+):5557", text)) == hosts
        assert (
            container(name, "Deployment")["ports"][0]["containerPort"]
            == objects(name)["Service"]["spec"]["ports"][0]["targetPort"]
        )


def test_the_pool_of_llm_d_selects_the_pods() -> None:
    pool = objects("llm-d.yaml")["InferencePool"]["spec"]
    labels = objects("server.yaml")["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in pool["targetPorts"]] == [8000]
    (rule,) = objects("llm-d.yaml")["HTTPRoute"]["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == objects("llm-d.yaml")["InferencePool"]["metadata"]["name"]


@pytest.mark.slow  # it installs the schemas
def test_the_manifests_keep_the_schemas_of_kubernetes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/check_manifests.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(" passed for resource ") == 6
