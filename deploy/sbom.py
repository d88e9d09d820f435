#!/usr/bin/env python3
"""What programs are linked with, as an SPDX 2.3 document in JSON: each shared library that the loader finds for
them, with the package of the system that it comes from, and CUDA's runtime where it is part of them.

usage: deploy/sbom.py PROGRAM... > sbom.spdx.json
"""
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def libraries(program):
    """Paths of all that the loader maps for it, itself not."""
    found = re.findall(r"(?:=> )?(/[^ ]+) \(0x", run("ldd", program))
    return {os.path.realpath(path) for path in found}


def owners_of(paths):
    """The package that owns each file; of a merged /usr it may know the name without."""
    names = {name: path for path in paths for name in (path, path.removeprefix("/usr"))}
    owners = {}
    for line in run("dpkg-query", "-S", *names).splitlines():
        packages, _, name = line.rpartition(": ")
        if name in names and not packages.startswith("diversion"):
            owners[names[name]] = packages.split(",")[0]
    return owners


def describe(package):
    form = "${binary:Package}\\n${Version}\\n${source:Package}\\n${Maintainer}\\n${Homepage}"
    return (run("dpkg-query", "-W", "-f", form, package).split("\n") + [""] * 5)[:5]


CUDA_RUNTIME = "cuda-cudart-static"
CUDA_RUNTIME_MARK = b"/cudart.shm."  # a name that it has for its own use, also without symbols


def has_cuda_runtime(program):
    with open(program, "rb") as file:
        return CUDA_RUNTIME_MARK in file.read()


def cuda_runtime():
    """Its entry. A static library has no package to ask: the version is the compiler's that brought it."""
    entry = {
        "SPDXID": spdx_id("Static", CUDA_RUNTIME), "name": CUDA_RUNTIME,
        "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
        "supplier": "Organization: NVIDIA Corporation"}
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    version = re.search(r"V([0-9.]+)", run(nvcc, "--version")) if os.path.exists(nvcc) else None
    if version:
        entry["versionInfo"] = version.group(1)
    return entry


def spdx_id(*words):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def document(programs):
    packages, relations, known = [], [], {}
    needs = {program: libraries(program) for program in programs}
    owners = owners_of(set().union(*needs.values()))
    for program in programs:
        name = os.path.basename(program)
        version = run(program, "--version").split()
        me = spdx_id("Program", name)
        packages.append({
            "SPDXID": me, "name": name, "versionInfo": version[1] if len(version) > 1 else "unknown",
            "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
            "licenseConcluded": "NOASSERTION", "licenseDeclared": "Apache-2.0",
            "copyrightText": "NOASSERTION",
            "checksums": [{"algorithm": "SHA256", "checksumValue": digest(program)}]})
        relations.append({"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES",
                          "relatedSpdxElement": me})
        if has_cuda_runtime(program):
            if CUDA_RUNTIME not in known:
                packages.append(cuda_runtime())
                known[CUDA_RUNTIME] = packages[-1]["SPDXID"]
            relations.append({"spdxElementId": me, "relationshipType": "STATIC_LINK",
                              "relatedSpdxElement": known[CUDA_RUNTIME]})
        for path in sorted(needs[program]):
            owner = owners.get(path)
            key = owner or path
            if key not in known:
                known[key] = spdx_id("Package", key)
                label, version_text, source, maintainer, home = describe(owner) if owner else (
                    os.path.basename(path), "", "", "", "")
                entry = {
                    "SPDXID": known[key], "name": label.split(":")[0], "downloadLocation": "NOASSERTION",
                    "filesAnalyzed": False, "licenseConcluded": "NOASSERTION",
                    "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
                    "comment": f"found as {os.path.basename(path)}"}
                if version_text:
                    entry["versionInfo"] = version_text
                    entry["supplier"] = f"Organization: {maintainer}"
                    entry["externalRefs"] = [{
                        "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                        "referenceLocator": f"pkg:deb/debian/{source}@{version_text}"}]
                    if home:
                        entry["homepage"] = home
                packages.append(entry)
            relations.append({"spdxElementId": me, "relationshipType": "DYNAMIC_LINK",
                              "relatedSpdxElement": known[key]})
    unique = {json.dumps(r, sort_keys=True): r for r in relations}
    content = json.dumps([packages, list(unique.values())], sort_keys=True).encode()
    return {
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": "tandem", "documentNamespace": "urn:tandem:sbom:" + hashlib.sha256(content).hexdigest(),
        "creationInfo": {
            "created": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: tandem-sbom"]},
        "packages": packages, "relationships": list(unique.values())}


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    json.dump(document(sys.argv[1:]), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
