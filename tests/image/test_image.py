"""The images, taken from their archives: small, with nothing but programs and what they load, for a user
without rights and a root that nobody writes to; and a whole cluster of them answers bit for bit as one
process does, and ends without a trace."""
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "e2e"))
from cluster import ROOT, Cluster, Skip, main, test, wait_until  # noqa: E402
from one_process import MODEL, ask, one_process, reference_prompts  # noqa: E402

IMAGES = ("tandem", "tandem-etcd")
FOLDER = os.path.join(ROOT, "build", "image")
BUILDAH = os.path.join(ROOT, "deploy", "image", "buildah.sh")
SIZE_MAX = 120 * 10 ** 6  # bytes, unpacked
USER = 65532
STEPS = 12
END_S = 30  # the shortest grace period of deploy/k8s

# A container by hand, as a pod has it and buildah doesn't: processes and shared memory of its own, where
# the program is process 1, a root that nobody can write to, and a user without rights.
ENTER = r"""
set -eu
root=$1 tool=$2 volumes=$3
shift 3
mount --bind "$root" "$root"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"
[ -z "$tool" ] || cp "$tool" "$root/tmp/tool"
for volume in $volumes; do
    mkdir -p "$root${volume#*:}"
    mount --bind "${volume%%:*}" "$root${volume#*:}"
done
mount -o remount,bind,ro "$root"
if touch "$root/written" 2>/dev/null; then
    echo 'the root can be written to' >&2
    exit 99
fi
exec setpriv --no-new-privs chroot --userspec=65532:65532 --groups= "$root" "$@"
"""
CLEAN_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_storage = None
_images = {}


def output(command, **more):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, check=False, **more)
    assert done.returncode == 0, (command, done.returncode, done.stderr.decode()[-2000:])
    return done.stdout.decode()


def buildah_command(*arguments):
    # vfs: a container's root is a folder, which is there without a mount.
    return [BUILDAH, _storage, "vfs", *arguments]


def buildah(*arguments):
    return output(buildah_command(*arguments)).strip()


def by_hand(root, command, tool="", volumes=()):
    return ["unshare", "--mount", "--propagation", "private", "--ipc", "--pid", "--fork",
            "--kill-child", "bash", "-c", ENTER, "enter", root, tool, " ".join(volumes), *command]


class Image:
    """An image as it is in its archive, and a root file system of it."""

    def __init__(self, name):
        self.name = name
        found = glob.glob(os.path.join(FOLDER, f"{name}-[0-9]*.tar"))
        assert len(found) == 1, (name, found, "make image makes it")
        self.archive = found[0]
        self.version = re.search(r"-([0-9][^-]*)\.tar$", self.archive).group(1)
        self.container = self.new_container("look")
        self.root = buildah("mount", self.container)

    def new_container(self, name):
        return buildah("from", "--name", f"{self.name}-{name}", f"oci-archive:{self.archive}")

    def blobs(self):
        """{path in the archive: bytes}."""
        with tarfile.open(self.archive) as archive:
            return {member.name: archive.extractfile(member).read()
                    for member in archive if member.isfile()}

    def files(self):
        for folder, _, names in os.walk(self.root):
            for name in names:
                yield os.path.join(folder, name)

    def programs(self):
        return sorted(os.listdir(os.path.join(self.root, "usr/bin")))

    def run(self, *command, tool=""):
        """What a command says in a container by hand."""
        return output(by_hand(self.root, command, tool), env=CLEAN_ENV)


def image(name):
    if name not in _images:
        _images[name] = Image(name)
    return _images[name]


def in_place(path, root):
    """A path of the image, its links followed within the image."""
    folder = root
    for part in path.strip("/").split("/"):
        folder = os.path.join(folder, part)
        if os.path.islink(folder):
            target = os.readlink(folder)
            folder = in_place(target, root if target.startswith("/") else os.path.dirname(folder))
    return folder


def is_elf(path):
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


@test
def test_archives_say_what_they_hold(options):
    for name in IMAGES:
        it = image(name)
        blobs = it.blobs()
        for path, content in blobs.items():
            if path.startswith("blobs/sha256/"):
                assert hashlib.sha256(content).hexdigest() == os.path.basename(path), path

        def blob(reference):
            return json.loads(blobs["blobs/" + reference["digest"].replace(":", "/")])

        manifests = json.loads(blobs["index.json"])["manifests"]
        assert len(manifests) == 1
        assert manifests[0]["annotations"]["org.opencontainers.image.ref.name"] == \
            f"{name}:{it.version}"
        config = blob(blob(manifests[0])["config"])
        assert config["os"] == "linux"
        own = config["config"]
        assert own["User"] == f"{USER}:{USER}"
        # A shell would get the signals.
        assert "Entrypoint" not in own and len(own["Cmd"]) == 1, own
        assert os.access(in_place(own["Cmd"][0], it.root), os.X_OK), own
        labels = {key.rsplit(".", 1)[1]: value for key, value in own["Labels"].items()
                  if key.startswith("org.opencontainers.image.")}
        assert labels["title"] == name and labels["licenses"] == "Apache-2.0", labels
        assert labels["version"] == it.version and labels["description"], labels
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["revision"]), labels


@test
def test_images_are_small_and_have_nothing_else(options):
    for name in IMAGES:
        it = image(name)
        size = sum(os.lstat(path).st_size for path in it.files())
        print(f"    {name}: {size / 1e6:.1f} MB unpacked, {os.path.getsize(it.archive) / 1e6:.1f} MB "
              f"as an archive, {len(it.programs())} programs")
        assert size < SIZE_MAX, (name, size)
        assert all(program.startswith(("tandem", "etcd")) for program in it.programs())
        for path in it.files():
            info = os.lstat(path)
            where = os.path.relpath(path, it.root)
            assert info.st_uid == 0 and info.st_gid == 0, where
            assert not info.st_mode & (stat.S_ISUID | stat.S_ISGID), where
            assert stat.S_ISLNK(info.st_mode) or not info.st_mode & 0o022, where
        with open(in_place("/etc/passwd", it.root), encoding="ascii") as file:
            assert f":{USER}:{USER}:" in file.read()
        with open(in_place("/etc/ssl/certs/ca-certificates.crt", it.root), encoding="ascii") as file:
            assert file.read().count("BEGIN CERTIFICATE") > 100
        known = os.listdir(os.path.join(it.root, "var/lib/dpkg/status.d"))
        assert {"libc6", "ca-certificates"} <= set(known), known
        unlicensed = [package for package in known if not os.path.exists(
            os.path.join(it.root, "usr/share/doc", package, "copyright"))]
        assert not unlicensed, unlicensed


@test
def test_manifests_name_programs_that_are_there(options):
    """What deploy/k8s runs, by each image's name."""
    found = 0
    for path in glob.glob(os.path.join(ROOT, "deploy/k8s/**/*.yaml"), recursive=True):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for name, program in re.findall(r"image: (\S+)\n\s+command: \[(\S+)\]", text):
            assert os.access(in_place(program, image(name).root), os.X_OK), (path, name, program)
            found += 1
        for name, tag in re.findall(r"- name: (\S+)\n\s+newTag: (\S+)", text):
            assert tag == image(name).version, path
    assert found == 5, found


@test
def test_programs_answer_without_rights_on_a_read_only_root(options):
    it = image("tandem")
    assert {"tandem-router", "tandem-prefill", "tandem-decode", "tandem-kvstore",
            "tandemctl"} <= set(it.programs())
    for program in it.programs():
        assert program in it.run(f"/usr/bin/{program}", "--help"), program
        assert it.version in it.run(f"/usr/bin/{program}", "--version"), program
    for program in image("tandem-etcd").programs():
        word = "version" if program == "etcdctl" else "--version"
        assert "ersion: 3." in image("tandem-etcd").run(f"/usr/bin/{program}", word), program


@test
def test_every_library_is_found_in_the_image(options):
    for name in IMAGES:
        it = image(name)
        (loader,) = glob.glob(os.path.join(it.root, "usr/lib*/ld-linux-*.so.*"))
        checked = 0
        for path in it.files():
            if os.path.islink(path) or path == loader or not is_elf(path):
                continue
            inside = path[len(it.root):]
            # It fails on what is missing. Programs without any libraries are not the loader's.
            with open(path, "rb") as file:
                if b"ld-linux" not in file.read() and "/lib/" not in inside:
                    continue
            listed = it.run(loader[len(it.root):], "--list", inside)
            assert "not found" not in listed, (inside, listed)
            checked += 1
        print(f"    {name}: {checked} programs and libraries")
        assert checked > 0


@test
def test_ucx_finds_its_transports_in_the_image(options):
    tool = shutil.which("ucx_info")
    if tool is None:
        raise Skip("ucx_info is needed (package ucx-utils)")
    said = image("tandem").run("/tmp/tool", "-d", tool=tool)
    transports = set(re.findall(r"Transport: (\S+)", said))
    # cma is a plug-in's; the others are UCX's own.
    assert {"tcp", "posix", "sysv", "self", "cma"} <= transports, transports


class ImageCluster(Cluster):
    """One process of each role, each in a container of its own."""

    def __init__(self, options, command):
        super().__init__(options.bin)
        self.roles = ("router", "kvstore", "prefill", "decode")
        self.command_of = command  # of (container, volumes, command)
        self.launchers = {}  # id -> the buildah that runs it
        self.codes = {}  # id -> what it ended with

    def __enter__(self):
        try:
            os.chmod(self.dir, 0o755)
            os.mkdir(self.run_dir)
            with open(self.path("cluster.secret"), "wb") as file:
                file.write(os.urandom(32))
            os.mkdir(self.path("tier"))
            for path in (self.run_dir, self.path("cluster.secret"), self.path("tier")):
                os.chmod(path, 0o600 if os.path.isfile(path) else 0o700)
                os.chown(path, USER, USER)
            for role in self.roles:
                self.start_role(role)
            wait_until(lambda: self.request("GET", "/ready").status == 200, self.timeout_s, "ready")
        except BaseException:
            self.print_logs()
            self.__exit__(None, None, None)
            raise
        return self

    def path(self, name):
        return os.path.join(self.run_dir, name)

    def start_role(self, role):
        process_id = role if role == "router" else f"{role}-1"
        flags = ["--id", process_id, "--listen", "tcp://127.0.0.1:*", "--http", "127.0.0.1:0",
                 "--cluster-secret-file", "/run/tandem/cluster.secret",
                 "--ready-file", f"/run/tandem/{process_id}.ready"]
        if role != "kvstore":
            flags += ["--model", "/models/" + os.path.basename(MODEL)]
        if role == "router":
            flags += ["--allow-placement", "--self-prefill-tokens", "0"]
        else:
            flags += ["--router", self.router_endpoint]
        if role == "kvstore":
            flags += ["--capacity", "128M", "--tier-dir", "/run/tandem/tier/blocks",
                      "--tier-bytes", "64M"]
        elif role != "router":
            flags += ["--kv-memory", "128M", "--threads", "2"]
        container = image("tandem").new_container(process_id)
        log = self.path(f"{process_id}.log")
        with open(log, "wb") as file:
            self.launchers[process_id] = subprocess.Popen(
                self.command_of(container, [f"{os.path.dirname(MODEL)}:/models",
                                            f"{self.run_dir}:/run/tandem"],
                                [f"/usr/bin/tandem-{role}", *flags]),
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=CLEAN_ENV,
                start_new_session=True)
        self.processes[process_id] = {"id": process_id, "role": role, "log": log, "http": "",
                                      "container": container, "pid": 0}
        ready = self.path(f"{process_id}.ready")

        def is_ready():
            assert self.launchers[process_id].poll() is None, f"{process_id} ended while starting"
            return os.path.exists(ready) and os.path.getsize(ready) > 0

        wait_until(is_ready, self.timeout_s, f"{process_id} is ready")
        with open(ready, encoding="ascii") as file:
            self.processes[process_id]["http"] = file.read().split()[0]
        self.processes[process_id]["pid"] = self.pid_in_container(process_id)

    def pid_in_container(self, process_id):
        """Processes of containers are this machine's, too."""
        wanted = f"/run/tandem/{process_id}.ready".encode()
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                with open(path, "rb") as file:
                    words = file.read().split(b"\0")
                if words[0].startswith(b"/usr/bin/tandem-") and wanted in words and \
                        os.stat(os.path.dirname(path)).st_uid == USER:
                    return int(path.split("/")[2])
            except (FileNotFoundError, ProcessLookupError):
                pass
        raise AssertionError(f"no process is {process_id}")

    def end_all(self):
        """SIGTERM to all of them at once, as when a cluster is deleted; their exit codes."""
        for process_id in self.processes:
            # To the program itself, as a runtime does it, not to what has launched it.
            self.kill(process_id, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        for process_id, launcher in self.launchers.items():
            self.codes[process_id] = launcher.wait(max(0.1, deadline - time.monotonic()))
        return self.codes

    def down(self):
        for process_id, launcher in self.launchers.items():
            if launcher.poll() is None:
                if self.processes[process_id]["pid"]:
                    self.kill(process_id, signal.SIGKILL)
                else:
                    os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()
        for process in self.processes.values():
            buildah("rm", process["container"])


def traces():
    """What the images' user has on this machine: processes, and segments of shared memory."""
    found = []
    for path in glob.glob("/proc/[0-9]*") + glob.glob("/dev/shm/*"):
        try:
            if os.stat(path).st_uid == USER:
                found.append(path)
        except FileNotFoundError:
            pass
    with open("/proc/sysvipc/shm", encoding="ascii") as file:
        uid_at = file.readline().split().index("uid")
        found += [line for line in file if int(line.split()[uid_at]) == USER]
    return found


def check_cluster(options, command, carrier):
    prompts = reference_prompts("v00", "v10", "v15", "v20")
    expected = one_process(options, prompts, STEPS)
    assert not traces(), traces()
    with ImageCluster(options, command) as c:
        assert [ask(c, ids, STEPS)[0] for ids in prompts] == expected
        moved = c.metrics("decode-1")
        assert moved[f'tandem_decode_transfer_bytes_total{{carrier="{carrier}"}}'] > 0, moved
        wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] > 0, 10, "stored blocks")
        assert c.metrics("kvstore-1")["tandem_kvstore_tier_degraded"] == 0
        codes = c.end_all()
        assert set(codes.values()) == {0}, codes
        assert not traces(), traces()


@test
def test_i1_a_cluster_run_by_buildah_answers_as_one_process_and_leaves_nothing(options):
    """Its containers have this machine's shared memory, as nodes of one pod."""
    def command(container, volumes, program):
        mounts = [word for volume in volumes for word in ("--volume", volume)]
        return buildah_command("run", "--isolation", "chroot", "--cap-drop", "ALL", *mounts,
                               container, "--", *program)
    check_cluster(options, command, "shm")


@test
def test_i1_a_cluster_on_read_only_roots_answers_as_one_process_and_leaves_nothing(options):
    """As pods: each is process 1 of its own, and nothing is shared but the network."""
    def command(container, volumes, program):
        return by_hand(buildah("mount", container), program, volumes=volumes)
    check_cluster(options, command, "tcp")


if __name__ == "__main__":
    os.makedirs(FOLDER, exist_ok=True)
    _storage = tempfile.mkdtemp(prefix="test-", dir=FOLDER)
    try:
        main(__doc__)
    finally:
        shutil.rmtree(_storage)
