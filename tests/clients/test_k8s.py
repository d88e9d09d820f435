#!/usr/bin/env python3
"""deploy/k8s: each overlay is what Kubernetes' schemas say, and what we say: pods without rights, with
limits; probes, ports, metrics and options that the programs really have; names that meet."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import client_venv  # noqa: E402

client_venv.enter(__file__)

import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402

from cluster import ROOT, Skip, main, shared, test  # noqa: E402

K8S = os.path.join(ROOT, "deploy", "k8s")
OVERLAYS = ("single-node-cpu", "multi-node-cpu", "edge", "gpu-rdma")
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda", "etcd.Dockerfile")
SCHEMAS = "1.32"  # of this Kubernetes
UNITS = {"k": 10 ** 3, "M": 10 ** 6, "G": 10 ** 9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_built = {}


def kubectl_is_new():
    try:
        text = subprocess.run(["kubectl", "version", "--client"], stdout=subprocess.PIPE,
                              check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return False
    found = re.search(r"v1\.(\d+)", text)
    return found is not None and int(found.group(1)) >= 27


def monitored(folder, overlay):
    """The same overlay, with the component that is for clusters that have the Prometheus operator."""
    path = os.path.join(folder, "overlays", overlay, "kustomization.yaml")
    with open(path, encoding="utf-8") as file:
        parsed = yaml.safe_load(file)
    parsed["components"].append("../../components/monitor")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(parsed, file)


def objects(overlay):
    """All of an overlay, built by kustomize in a copy of the folder that has the secrets.

    "OVERLAY+monitor": with its metrics collected."""
    if not kubectl_is_new():
        raise Skip("kubectl 1.27 or newer is needed")
    if overlay not in _built:
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "k8s")
            shutil.copytree(K8S, copy)
            wanted, plus, _ = overlay.partition("+")
            if plus:
                monitored(copy, wanted)
            for name, content in (("cluster.secret", os.urandom(32)), ("api.keys", b"sk-test\n")):
                with open(os.path.join(copy, "overlays", wanted, name), "wb") as file:
                    file.write(content)
            done = subprocess.run(["kubectl", "kustomize", os.path.join(copy, "overlays", wanted)],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
            assert done.returncode == 0, done.stderr.decode()[:2000]
            assert b"deprecated" not in done.stderr, done.stderr.decode()
        _built[overlay] = list(yaml.safe_load_all(done.stdout))
    return _built[overlay]


def of_kind(overlay, *kinds):
    return [each for each in objects(overlay) if each["kind"] in kinds]


def workloads(overlay):
    return of_kind(overlay, "Deployment", "StatefulSet")


def component(labels):
    return labels["app.kubernetes.io/component"]


def pods(overlay):
    """(component, pod spec, its only container) of each workload."""
    for each in workloads(overlay):
        template = each["spec"]["template"]
        spec = template["spec"]
        assert len(spec["containers"]) == 1
        yield component(template["metadata"]["labels"]), spec, spec["containers"][0]


def configs(overlay):
    """{role: (text, parsed)} of the files that programs read."""
    data = of_kind(overlay, "ConfigMap")[0]["data"]
    return {name.split(".")[0]: (text, yaml.safe_load(text)) for name, text in data.items()}


def size(text):
    number, unit = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text)).groups()
    return int(number) * UNITS.get(unit, 1)


def port_of(address):
    return int(str(address).rsplit(":", 1)[1])


def named_ports(container):
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@test
def test_each_object_is_what_its_schema_says(options):
    for overlay in OVERLAYS:
        seen = set()
        for each in objects(overlay):
            kubernetes_validate.validate(each, SCHEMAS, strict=True)
            name = (each["kind"], each["metadata"]["name"])
            assert name not in seen, name
            seen.add(name)
            assert each["kind"] == "Namespace" or each["kind"] == "PersistentVolume" or \
                each["metadata"]["namespace"] == "tandem", name


@test
def test_pods_have_no_rights_and_have_limits(options):
    for overlay in OVERLAYS:
        for role, spec, container in pods(overlay):
            where = (overlay, role)
            context = spec["securityContext"]
            assert context["runAsNonRoot"] and context["runAsUser"] > 0, where
            assert context["seccompProfile"]["type"] == "RuntimeDefault", where
            assert spec["automountServiceAccountToken"] is False, where
            assert not any(spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")), where
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"], where
            assert own["capabilities"]["drop"] == ["ALL"] and "add" not in own["capabilities"], where
            for what in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(container["resources"][what]), where
            assert spec["terminationGracePeriodSeconds"] >= 30, where
        for account in of_kind(overlay, "ServiceAccount"):
            assert account["automountServiceAccountToken"] is False


@test
def test_programs_take_their_configuration(options):
    """--print-config reads the file as the program would: a name or value that it doesn't know ends it."""
    for overlay in OVERLAYS:
        files = configs(overlay)
        roles = {role for role, _, _ in pods(overlay)} - {"etcd"}
        assert set(files) == roles, (overlay, set(files), roles)
        with tempfile.TemporaryDirectory() as folder:
            for role, _, container in pods(overlay):
                if role == "etcd":
                    continue
                path = os.path.join(folder, f"{role}.yaml")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(files[role][0])
                args = [arg.replace(f"/config/{role}.yaml", path).replace("$(POD_NAME)", "pod-0")
                        .replace("$(POD_IP)", "10.0.0.1") for arg in container["args"]]
                assert any(arg == f"--config={path}" for arg in args)
                assert container["command"] == [f"/usr/bin/tandem-{role}"]
                done = subprocess.run([os.path.join(options.bin, f"tandem-{role}"), *args,
                                       "--print-config"], stdout=subprocess.PIPE,
                                      stderr=subprocess.PIPE, check=False)
                assert done.returncode == 0, (overlay, role, done.stderr.decode())
        # What must be the same everywhere.
        for name in ("kv-codec", "cluster", "etcd"):
            values = {role: parsed.get(name) for role, (_, parsed) in files.items()
                      if name != "kv-codec" or role != "kvstore"}
            assert len(set(values.values())) == 1, (overlay, name, values)


@test
def test_ports_times_and_sizes_fit_the_configuration(options):
    for overlay in OVERLAYS:
        files = configs(overlay)
        for role, spec, container in pods(overlay):
            if role == "etcd":
                continue
            where, parsed = (overlay, role), files[role][1]
            ports = named_ports(container)
            assert ports == {"http": port_of(parsed["http"]), "bus": port_of(parsed["listen"])}, where
            if "drain-ms" in parsed:
                assert parsed["drain-ms"] / 1000 < spec["terminationGracePeriodSeconds"], where
            pool = parsed.get("kv-memory", parsed.get("capacity"))
            if pool is not None:
                limit = size(container["resources"]["limits"]["memory"])
                shm = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
                assert shm[0]["medium"] == "Memory" and size(shm[0]["sizeLimit"]) > size(pool + "i"), where
                assert limit > 1.2 * size(pool + "i"), where
            mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            for path in [parsed["cluster-secret-file"], parsed.get("model"), parsed.get("tier-dir")]:
                assert path is None or any(path.startswith(f"{mount}/") for mount in mounted), where
            for mount in mounted.values():
                assert mount["name"] in {volume["name"] for volume in spec["volumes"]} | {"tier"}, where
        routers = [port_of(files["router"][1][name]) for name in ("http", "listen")]
        assert routers == [8000, 5570]  # the program's own


@test
def test_probes_and_metrics_are_the_programs_own(options):
    c = shared(options, prefill=1, decode=1, kvstore=1, etcd=True)
    process = {"router": "router", "prefill": "prefill-1", "decode": "decode-1",
               "kvstore": "kvstore-1", "etcd": "etcd"}
    for overlay in OVERLAYS:
        for role, _, container in pods(overlay):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                get = container[probe]["httpGet"]
                assert get["port"] in named_ports(container), (overlay, role, probe)
                assert c.request("GET", get["path"], to=process[role]).status == 200, get
        for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
            role = scaler["spec"]["scaleTargetRef"]["name"].removeprefix("tandem-")
            for metric in scaler["spec"]["metrics"]:
                assert metric["pods"]["metric"]["name"] in c.metrics(process[role]), scaler


@test
def test_names_and_selectors_meet(options):
    for overlay in OVERLAYS:
        templates = [each["spec"]["template"] for each in workloads(overlay)]
        labels = [template["metadata"]["labels"] for template in templates]

        def selected(selector):
            wanted = selector.get("matchLabels", {})
            return [each for each in labels if wanted.items() <= each.items()]

        for each in workloads(overlay):
            assert each["spec"]["selector"]["matchLabels"].items() \
                <= each["spec"]["template"]["metadata"]["labels"].items()
            refused = [volume for volume in each["spec"]["template"]["spec"].get("volumes", [])
                       if "hostPath" in volume]
            assert not refused, refused
        for service in of_kind(overlay, "Service"):
            found = selected({"matchLabels": service["spec"]["selector"]})
            assert len(found) == 1, service
            ports = named_ports(templates[labels.index(found[0])]["spec"]["containers"][0])
            assert all(port["targetPort"] in ports for port in service["spec"]["ports"]), service
        for budget in of_kind(overlay, "PodDisruptionBudget"):
            assert len(selected(budget["spec"]["selector"])) == 1, budget
        made = {(each["kind"], each["metadata"]["name"]) for each in objects(overlay)}
        for role, spec, _ in pods(overlay):
            assert ("ServiceAccount", spec["serviceAccountName"]) in made, role
            for volume in spec.get("volumes", []):
                for field, kind, name in (("secret", "Secret", "secretName"),
                                          ("configMap", "ConfigMap", "name"),
                                          ("persistentVolumeClaim", "PersistentVolumeClaim",
                                           "claimName")):
                    if field in volume:
                        assert (kind, volume[field][name]) in made, (role, volume)
        policies = of_kind(overlay, "NetworkPolicy")
        shut = [each for each in policies if each["metadata"]["name"] == "tandem-deny-all"]
        assert sorted(shut[0]["spec"]["policyTypes"]) == ["Egress", "Ingress"]
        # Only routers' HTTP and everybody's metrics are open to others.
        for policy in policies:
            for rule in policy["spec"].get("ingress", []):
                assert "from" in rule or [port["port"] for port in rule["ports"]] == ["http"], policy


def matches(selector, labels):
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", rule
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return selector["matchLabels"].items() <= labels.items()


@test
def test_each_pod_of_ours_is_monitored_once(options):
    """The operator's own objects have no schema here: these fields are what we use of them."""
    c = shared(options, prefill=1, decode=1, kvstore=1, etcd=True)
    process = {"router": "router", "prefill": "prefill-1", "decode": "decode-1",
               "kvstore": "kvstore-1"}
    for overlay in OVERLAYS:
        monitors = of_kind(overlay + "+monitor", "ServiceMonitor")
        assert len(monitors) == 1 and not of_kind(overlay, "ServiceMonitor")
        monitor = monitors[0]
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert monitor["metadata"]["namespace"] == "tandem"  # it selects services of its own namespace
        assert set(monitor["spec"]) == {"selector", "endpoints"}
        (endpoint,) = monitor["spec"]["endpoints"]
        assert set(endpoint) == {"port", "path", "interval"}
        assert re.fullmatch(r"\d+s", endpoint["interval"])
        targets = []
        for service in of_kind(overlay + "+monitor", "Service"):
            kubernetes_validate.validate(service, SCHEMAS, strict=True)
            ports = [port for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
            if not ports or not matches(monitor["spec"]["selector"], service["metadata"]["labels"]):
                continue
            for each in workloads(overlay + "+monitor"):
                template = each["spec"]["template"]
                labels = template["metadata"]["labels"]
                if not service["spec"]["selector"].items() <= labels.items():
                    continue
                role = component(labels)
                targets.append(role)
                assert ports[0]["targetPort"] in named_ports(template["spec"]["containers"][0])
                said = c.request("GET", endpoint["path"], to=process[role], check=True)
                assert f"tandem_{role}_".encode() in said.body
        roles = {role for role, _, _ in pods(overlay)} - {"etcd"}
        assert sorted(targets) == sorted(roles), (overlay, targets)


@test
def test_alerts_become_rules_of_the_operator(options):
    done = subprocess.run([os.path.join(K8S, "components/monitor/rules.sh")],
                          stdout=subprocess.PIPE, check=True)
    (rule,) = yaml.safe_load_all(done.stdout)
    assert (rule["apiVersion"], rule["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    with open(os.path.join(ROOT, "deploy/monitoring/rules.yaml"), encoding="utf-8") as file:
        assert rule["spec"] == yaml.safe_load(file)


@test
def test_dockerfiles_are_linted(options):
    hadolint = os.path.join(os.path.dirname(sys.executable), "hadolint")
    for name in DOCKERFILES:
        path = os.path.join(ROOT, "deploy/image", name)
        done = subprocess.run([hadolint, "--no-color", path], stdout=subprocess.PIPE, check=False)
        assert done.returncode == 0, done.stdout.decode()
        with open(path, encoding="utf-8") as file:
            text = file.read()
        # What it does not look at: files that are copied and programs that are run are there.
        for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
            assert os.path.exists(os.path.join(ROOT, source)), (name, source)
        for program in re.findall(r"(?:RUN|&&) (deploy/\S+)", text):
            assert os.access(os.path.join(ROOT, program), os.X_OK), (name, program)
        assert re.search(r"^USER 65532:65532$", text, re.MULTILINE), name


@test
def test_devices_are_whole_and_asked_for_once(options):
    """Extended resources and huge pages can't be overcommitted: what is asked for is what is had."""
    found = 0
    for overlay in OVERLAYS:
        files = configs(overlay)
        for role, _, container in pods(overlay):
            resources = container["resources"]
            special = {name: value for name, value in resources["limits"].items()
                       if "/" in name or name.startswith("hugepages-")}
            assert all(resources["requests"].get(name) == value for name, value in special.items())
            wants = role in files and files[role][1].get("backend") == "cuda"
            assert wants == ("nvidia.com/gpu" in special), (overlay, role)
            assert wants == ("-cuda:" in container["image"]), (overlay, role)
            if wants:
                assert size(special["hugepages-2Mi"]) > size(files[role][1]["kv-memory"] + "i")
            found += wants
    assert found == 2


@test
def test_versions_are_one(options):
    """What the programs say, what images are labelled with, and what the overlays want."""
    said = subprocess.run([os.path.join(options.bin, "tandem-router"), "--version"],
                          stdout=subprocess.PIPE, check=True).stdout.decode()
    version = re.search(r"\d+\.\d+\.\d+", said).group(0)
    for name in DOCKERFILES:
        with open(os.path.join(ROOT, "deploy/image", name), encoding="utf-8") as file:
            text = file.read()
        assert set(re.findall(r"ARG VERSION=(\S+)|-t \S+:(\S+)", text)) == \
            {(version, ""), ("", version)}, name
    for overlay in OVERLAYS:
        for role, _, container in pods(overlay):
            assert container["image"].endswith(f":{version}"), (overlay, role)


if __name__ == "__main__":
    main(__doc__)
