#!/usr/bin/env python3
"""Checks the manifests, and what the hook makes of a domain. Needs PyYAML.

With kubernetes-validate (PyPI) the manifests are also compared with Kubernetes' published schemas, and with jsonschema
(which that package brings) KubeVirt's kinds with the fields of its API.
"""
import copy
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

import yaml

try:
    import jsonschema
except ImportError:
    jsonschema = None

try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

# Releases of Kubernetes whose schemas the manifests fit: the oldest and the newest that were tried.
RELEASES = ["1.28", "1.37"]

HERE = pathlib.Path(__file__).parent
QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
DOMAIN = """<domain type="kvm"><name>ns_db</name><memory unit="{unit}">{memory}</memory><vcpu>2</vcpu>
<memoryBacking/><cpu mode="host-model"><topology sockets="1" cores="2" threads="1"/></cpu>
<devices><disk type="file"/></devices></domain>"""


def documents():
    for path in sorted(HERE.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def of_kind(kind):
    return [document for _, document in documents() if document["kind"] == kind]


class Manifests(unittest.TestCase):
    def test_each_document_is_an_object_with_a_name(self):
        names = set()
        for path, document in documents():
            self.assertTrue({"apiVersion", "kind", "metadata"} <= document.keys(), path)
            name = (document["kind"], document["metadata"]["name"])
            self.assertNotIn(name, names, path)
            names.add(name)
        self.assertGreaterEqual(len(names), 6)

    def test_daemon_sets_select_their_pods_and_mount_what_they_have(self):
        configs = {config["metadata"]["name"]: config["data"] for config in of_kind("ConfigMap")}
        sets = of_kind("DaemonSet")
        self.assertEqual(len(sets), 2)
        for one in sets:
            self.assertEqual(one["apiVersion"], "apps/v1")
            template = one["spec"]["template"]
            wanted = one["spec"]["selector"]["matchLabels"]
            self.assertEqual(wanted, template["metadata"]["labels"])
            spec = template["spec"]
            self.assertTrue(spec["hostPID"])
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            for container in spec["containers"]:
                self.assertEqual(container["command"][0], "/demeter")
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                self.assertEqual(mounted, volumes.keys())
                folder, file = container["command"][-1].rsplit("/", 1)
                config = volumes["config"]
                if "configMap" in config:
                    self.assertIn(file, configs[config["configMap"]["name"]])
                else:
                    self.assertEqual(config["hostPath"]["path"], folder)
            for volume in volumes.values():
                kinds = volume.keys() - {"name"}
                self.assertEqual(len(kinds), 1, volume)

    def test_the_controller_has_the_rights_of_its_unit_and_keeps_its_state(self):
        (controller,) = [one for one in of_kind("DaemonSet") if "host" in one["metadata"]["name"]]
        spec = controller["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        unit = (HERE.parent / "demeter-host.service").read_text()
        line = next(line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet="))
        in_unit = {name.removeprefix("CAP_") for name in line.split("=")[1].split()}
        rights = container["securityContext"]["capabilities"]
        self.assertEqual(set(rights["add"]), in_unit)
        self.assertEqual(rights["drop"], ["ALL"])
        self.assertNotIn("privileged", container["securityContext"])
        state = next(volume for volume in spec["volumes"] if volume["name"] == "state")
        self.assertEqual(state["hostPath"]["path"], "/var/lib/demeter")

    def test_the_example_names_the_hook(self):
        (vm,) = of_kind("VirtualMachine")
        annotations = vm["spec"]["template"]["metadata"]["annotations"]
        self.assertTrue(all(isinstance(value, str) for value in annotations.values()))
        (sidecar,) = json.loads(annotations["hooks.kubevirt.io/hookSidecars"])
        source = sidecar["configMap"]
        (config,) = [one for one in of_kind("ConfigMap") if one["metadata"]["name"] == source["name"]]
        self.assertIn(source["key"], config["data"])
        self.assertEqual(source["hookPath"], "/usr/bin/onDefineDomain")


@unittest.skipIf(kubernetes_validate is None, "pip install kubernetes-validate")
class Schemas(unittest.TestCase):
    def test_documents_fit_the_published_schemas(self):
        # KubeVirt's own kinds are not among them: see the next class.
        ours = [document for _, document in documents() if "kubevirt" not in document["apiVersion"]]
        self.assertGreaterEqual(len(ours), 5)
        for document in ours:
            for release in RELEASES:
                kubernetes_validate.validate(document, release, strict=True)

    def test_a_wrong_key_is_found(self):
        wrong = copy.deepcopy(of_kind("DaemonSet")[0])
        container = wrong["spec"]["template"]["spec"]["containers"][0]
        container["volumeMount"] = container.pop("volumeMounts")
        for release in RELEASES:
            with self.assertRaises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, release, strict=True)


@unittest.skipIf(jsonschema is None, "pip install jsonschema")
class KubeVirt(unittest.TestCase):
    """kubevirt.schema.json has the fields that we use; a new one is added to it from its source."""

    SCHEMA = json.loads((HERE / "kubevirt.schema.json").read_text())

    def errors(self, document, kind="VirtualMachine"):
        validator = jsonschema.Draft202012Validator({**self.SCHEMA, "$ref": f"#/$defs/{kind}"})
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]

    def test_the_example_has_only_fields_of_the_api(self):
        jsonschema.Draft202012Validator.check_schema(self.SCHEMA)
        (vm,) = of_kind("VirtualMachine")
        self.assertEqual(self.errors(vm), [])
        annotations = vm["spec"]["template"]["metadata"]["annotations"]
        sidecars = json.loads(annotations["hooks.kubevirt.io/hookSidecars"])
        self.assertEqual(self.errors(sidecars, "HookSidecarList"), [])
        sidecars[0]["configMap"]["path"] = sidecars[0]["configMap"].pop("hookPath")
        self.assertEqual(len(self.errors(sidecars, "HookSidecarList")), 1)

    def test_a_wrong_field_is_found(self):
        def domain(vm):
            return vm["spec"]["template"]["spec"]["domain"]

        for wrong, where in [
            (lambda vm: vm["spec"].pop("template"), "$.spec"),
            (lambda vm: domain(vm).pop("devices"), "$.spec.template.spec.domain"),
            (lambda vm: domain(vm)["cpu"].update(cores="2"), "$.spec.template.spec.domain.cpu.cores"),
            (lambda vm: domain(vm)["cpu"].update(core=2), "$.spec.template.spec.domain.cpu"),
            (lambda vm: domain(vm)["memory"].update(guest="8 GiB"), "$.spec.template.spec.domain.memory.guest"),
            (lambda vm: vm["spec"].update(runStrategy="always"), "$.spec.runStrategy"),
            (lambda vm: vm["spec"]["template"].update(labels={}), "$.spec.template"),
        ]:
            (vm,) = copy.deepcopy(of_kind("VirtualMachine"))
            wrong(vm)
            (error,) = self.errors(vm)
            self.assertEqual(error.split(": ")[0], where)


class Hook(unittest.TestCase):
    def prepare(self, annotations, memory=8192, unit="MiB", domain=DOMAIN):
        (config,) = [one for one in of_kind("ConfigMap") if "cells.py" in one["data"]]
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(config["data"]["cells.py"])
            script.flush()
            annotations = {f"demeter.org/{key}": value for key, value in annotations.items()}
            vmi = json.dumps({"metadata": {"annotations": annotations}})
            text = domain.format(memory=memory, unit=unit)
            command = [sys.executable, script.name, "--vmi", vmi, "--domain", text]
            return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_a_domain_gets_cells_binding_and_sockets(self):
        done = self.prepare({"fast-mib": "2048", "fast-node": "0", "slow-node": "3"})
        self.assertEqual(done.returncode, 0, done.stderr)
        domain = xml.fromstring(done.stdout)
        cells = [cell.attrib for cell in domain.findall("cpu/numa/cell")]
        self.assertEqual([cell["memory"] for cell in cells], ["2048", "6144"])
        self.assertEqual([cell.get("cpus") for cell in cells], ["0-1", None])
        self.assertEqual(domain.find("memoryBacking/source").get("type"), "memfd")
        self.assertEqual(domain.find("memoryBacking/access").get("mode"), "shared")
        nodes = [node.get("nodeset") for node in domain.findall("numatune/memnode")]
        self.assertEqual(nodes, ["0", "3"])
        self.assertEqual(domain.find("devices/channel/target").get("name"), "org.demeter.0")
        arguments = [of.get("value") for of in domain.findall(f"{QEMU}commandline/{QEMU}arg")]
        self.assertEqual(arguments[0], "-qmp")
        self.assertIsNotNone(domain.find("devices/disk"), "the rest stays")

    def test_units_count(self):
        done = self.prepare({"fast-mib": "1024"}, memory=4 * 1024**3, unit="b")
        cells = xml.fromstring(done.stdout).findall("cpu/numa/cell")
        self.assertEqual(cells[1].get("memory"), "3072")

    def test_what_is_wrong_is_one_line(self):
        huge = DOMAIN.replace("<memoryBacking/>", "<memoryBacking><hugepages/></memoryBacking>")
        for annotations, domain, why in [
            ({}, DOMAIN, "fast-mib is missing"),
            ({"fast-mib": "much"}, DOMAIN, "is no number"),
            ({"fast-mib": "8192"}, DOMAIN, "the VM has 8192 MiB"),
            ({"fast-mib": "1"}, huge, "huge pages"),
        ]:
            done = self.prepare(annotations, domain=domain)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(why, done.stderr)
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
