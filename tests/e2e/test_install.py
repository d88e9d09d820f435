"""make install: what is installed is whole, its units are what systemd takes and keep to their sandbox, and
the sample configurations are ones that the programs take and serve by."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Cluster, Skip, main, test

PREFIX = "/usr"
PRESETS = {"chat": ("router", "prefill", "decode"),
           "batch": ("router", "prefill", "decode", "kvstore"),
           "edge": ("router", "prefill", "decode")}
EXPOSURE_MAX = 20  # tenths, of systemd's own analysis: "ok"; 5.0 and more is "medium"
EDGE_RSS_MB = {"router": 220, "prefill": 420, "decode": 420}


class Installed:
    """Below a folder that plays the root; in_place: for that folder itself."""

    def __init__(self, options, in_place=False):
        self.options = options
        self.in_place = in_place

    def __enter__(self):
        self.root = tempfile.mkdtemp(prefix="tandem-install-")
        where = ["", self.root + PREFIX] if self.in_place else [self.root, PREFIX]
        subprocess.run([os.path.join(ROOT, "deploy/install.sh"), os.path.abspath(self.options.bin),
                        *where], stdout=subprocess.DEVNULL, check=True)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.root)

    def path(self, *parts):
        return os.path.join(self.root + PREFIX, *parts)

    def units(self):
        return sorted(glob.glob(self.path("lib/systemd/system/*.service")))


def print_config(program, *flags):
    done = subprocess.run([program, *flags, "--print-config"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, (program, flags, done.stderr.decode())
    return done.stdout.decode()


@test
def test_what_is_installed_is_whole(options):
    with Installed(options) as it:
        programs = sorted(os.listdir(it.path("bin")))
        assert "tandemctl" in programs and "tandem-router" in programs, programs
        for program in programs:
            text = subprocess.run([it.path("bin", program), "--help"], stdout=subprocess.PIPE,
                                  check=True).stdout.decode()
            assert program in text, (program, text)
            if program != "tandem-bench":
                subprocess.run([it.path("bin", program), "--version"], stdout=subprocess.DEVNULL,
                               check=True)
        assert len(it.units()) == 4
        for path in ("share/man/man1/tandemctl.1", "share/bash-completion/completions/tandemctl",
                     "lib/sysusers.d/tandem.conf", "share/doc/tandem/LICENSE"):
            assert os.path.getsize(it.path(path)) > 50, path


@test
def test_programs_are_hardened(options):
    """Position independent, tables read-only from the start, no stack that can be run, canaries, checked copies."""
    if "san-" in options.bin:
        raise Skip("sanitizers have checks of their own")
    with Installed(options) as it:
        for program in os.listdir(it.path("bin")):
            seen = subprocess.run(["readelf", "-W", "-h", "-l", "-d", "--dyn-syms", it.path("bin", program)],
                                  stdout=subprocess.PIPE, check=True).stdout.decode()
            assert re.search(r"Type: +DYN", seen), program
            assert "GNU_RELRO" in seen and re.search(r"FLAGS.* BIND_NOW", seen), program
            assert re.search(r"GNU_STACK.* RW +0x", seen), program
            assert "__stack_chk_fail" in seen and re.search(r"__\w+_chk@", seen), program


@test
def test_every_program_has_a_page_with_all_its_options(options):
    with Installed(options) as it:
        for program in os.listdir(it.path("bin")):
            with open(it.path("share/man/man1", f"{program}.1"), encoding="utf-8") as file:
                page = file.read().replace("\\-", "-")
            said = subprocess.run([it.path("bin", program), "--help"], stdout=subprocess.PIPE,
                                  check=True).stdout.decode()
            missing = [o for o in re.findall(r"^ +(--[a-z][a-z-]*)", said, re.M) if o not in page]
            assert not missing, (program, missing)
            assert page.startswith(".TH ") and ".SH SYNOPSIS" in page and "@PREFIX@" not in page


@test
def test_the_admin_reference_is_what_the_proto_says(options):
    subprocess.run([sys.executable, os.path.join(ROOT, "deploy/admin_doc.py"), "--check"], check=True)


@test
def test_sbom_names_what_programs_are_linked_with(options):
    programs = [os.path.join(options.bin, f"tandem-{role}") for role in ("router", "decode", "kvstore")]
    done = subprocess.run([sys.executable, os.path.join(ROOT, "deploy/sbom.py"), *programs],
                          stdout=subprocess.PIPE, check=True)
    bom = json.loads(done.stdout)
    names = {package["SPDXID"]: package for package in bom["packages"]}
    assert len(names) == len(bom["packages"]) and bom["spdxVersion"] == "SPDX-2.3"
    linked = {}
    for relation in bom["relationships"]:
        assert relation["relatedSpdxElement"] in names, relation
        if relation["relationshipType"] == "DYNAMIC_LINK":
            linked.setdefault(names[relation["spdxElementId"]]["name"], set()).add(
                names[relation["relatedSpdxElement"]]["name"])
    assert linked["tandem-router"] >= {"libzmq5", "libmicrohttpd12", "libjansson4", "libsodium23", "libc6"}
    assert "liblmdb0" in linked["tandem-kvstore"] and "liblmdb0" not in linked["tandem-router"]
    static = {names[relation["spdxElementId"]]["name"] for relation in bom["relationships"]
              if relation["relationshipType"] == "STATIC_LINK"}
    with open(programs[1], "rb") as file:
        with_cuda = b"cudaErrorCudartUnloading" in file.read()
    assert static == ({"tandem-decode"} if with_cuda else set())
    debian = [p for p in names.values() if p["SPDXID"].startswith("SPDXRef-Package")]
    assert all(p["versionInfo"] and p["externalRefs"] for p in debian), debian


@test
def test_units_start_programs_with_options_that_they_have(options):
    with Installed(options) as it, tempfile.TemporaryDirectory() as folder:
        for unit in it.units():
            with open(unit, encoding="utf-8") as file:
                text = file.read()
            assert "@PREFIX@" not in text
            command = re.search(r"^ExecStart=(.*)$", text, re.M).group(1).split()
            assert command[0].startswith(f"{PREFIX}/bin/"), command
            role = os.path.basename(command[0]).removeprefix("tandem-")
            preset = "batch"
            config = it.path("share/tandem/config", preset, f"{role}.yaml")
            flags = [word.replace(f"/etc/tandem/{role}.yaml", config).replace("%i", "1")
                     .replace("%d", folder) for word in command[1:]]
            said = print_config(it.path("bin", f"tandem-{role}"), *flags)
            credentials = re.findall(r"^LoadCredential=([a-z.]+):", text, re.M)
            assert credentials and all(f"%d/{name}" in text for name in credentials), unit
            drain = re.search(r"drain-ms\W+(\d+)", said)
            stop = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M).group(1))
            assert drain is None or int(drain.group(1)) / 1000 < stop, (unit, drain.group(0))


@test
def test_systemd_takes_the_units_and_finds_them_shut(options):
    if shutil.which("systemd-analyze") is None:
        raise Skip("systemd-analyze is needed")
    with Installed(options, in_place=True) as it:
        verify = subprocess.run(["systemd-analyze", "verify", "--man=no", *it.units()],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert verify.returncode == 0 and not verify.stdout, verify.stdout.decode()
        for unit in it.units():
            safe = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--no-pager",
                                   f"--threshold={EXPOSURE_MAX}", unit],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            assert safe.returncode == 0, safe.stdout.decode()[-3000:]


@test
def test_sample_configurations_are_taken(options):
    with Installed(options) as it:
        for preset, roles in PRESETS.items():
            found = {os.path.basename(path).split(".")[0]
                     for path in glob.glob(it.path("share/tandem/config", preset, "*.yaml"))}
            assert found == set(roles), (preset, found)
            said = {role: print_config(it.path("bin", f"tandem-{role}"), "--config",
                                       it.path("share/tandem/config", preset, f"{role}.yaml"))
                    for role in roles}
            codecs = {re.search(r"kv-codec\W+(\w+)", said[role]).group(1)
                      for role in roles if role != "kvstore"}
            assert len(codecs) == 1, (preset, codecs)


def rss_mb(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read()).group(1)) / 1024


def sample(preset, role):
    """Its lines as flags, but for what the cluster of the test decides itself."""
    own = ("http", "listen", "model", "router", "drain-ms", "kv-codec", "attention", "kv-memory")
    flags = []
    with open(os.path.join(ROOT, "deploy/config", preset, f"{role}.yaml"), encoding="utf-8") as file:
        for line in file:
            name, _, value = line.strip().partition(": ")
            if value and not name.startswith("#") and name not in own:
                flags += [f"--{name}", value]
    return flags


@test
def test_the_edge_sample_serves_in_little_memory(options):
    if "san-" in options.bin:
        raise Skip("sanitizers take memory of their own")
    with Cluster(options.bin, kvstore=0, kv_codec="i8", attention="window:1024,4", kv_memory="64M",
                 threads=1, router_args=sample("edge", "router"), prefill_args=sample("edge", "prefill"),
                 decode_args=sample("edge", "decode")) as c:
        for i in range(4):
            assert c.complete(f"{i} The fox and the mill. " * 40, max_tokens=30,
                              ignore_eos=True).usage["completion_tokens"] == 30
        used = {role: rss_mb(c.processes[c.ids(role)[0]]["pid"]) for role in EDGE_RSS_MB}
        print(f"    RSS: {', '.join(f'{role} {mb:.0f} MB' for role, mb in used.items())}")
        assert all(used[role] <= EDGE_RSS_MB[role] for role in used), used


if __name__ == "__main__":
    main(__doc__)
