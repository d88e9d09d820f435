"""Every series that a process exports is in deploy/monitoring/METRICS.md, and nothing else is; alerts and
dashboard ask for series, labels and values of labels that there are. --write makes the table anew."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT, Skip, main, shared, test

FOLDER = os.path.join(ROOT, "deploy", "monitoring")
TABLE = os.path.join(FOLDER, "METRICS.md")
INTRO = """# Metrics

Each process serves these at `/metrics` of its `--http` address, in Prometheus' text format. Counters only
grow, and begin anew with the process; histograms have `_bucket`, `_sum` and `_count`, in seconds.

"""
TIER = tempfile.TemporaryDirectory()  # of the store's cold tier, which has series of its own
HISTOGRAM = ("_bucket", "_sum", "_count")
PROMQL = {"histogram_quantile", "sum", "min", "max", "by", "rate", "increase", "le", "instance", "job"}


def scrape(c, process_id):
    """{name: (type, help, {label: values})}"""
    found, kinds, helps = {}, {}, {}
    for line in c.request("GET", "/metrics", to=process_id, check=True).body.decode().splitlines():
        words = line.split(" ", 3)
        if line.startswith("# HELP "):
            helps[words[2]] = words[3] if len(words) > 3 else ""
        elif line.startswith("# TYPE "):
            kinds[words[2]] = words[3]
            found[words[2]] = (words[3], helps.get(words[2], ""), {})
        else:
            series = line.rsplit(" ", 1)[0]
            name = series.split("{")[0]
            for suffix in HISTOGRAM:
                if name.endswith(suffix) and kinds.get(name.removesuffix(suffix)) == "histogram":
                    name = name.removesuffix(suffix)
            for label, value in re.findall(r'(\w+)="([^"]*)"', series):
                if label != "le":
                    found[name][2].setdefault(label, set()).add(value)
    return found


def exported(options):
    c = shared(options, prefill=1, decode=1, kvstore=1, etcd=True,
               kvstore_args=["--tier-dir", TIER.name, "--tier-bytes", "64M"])
    assert c.complete("Say something. " * 10, max_tokens=4).status == 200
    all_of = {}
    for process_id in ("router", "prefill-1", "decode-1", "kvstore-1"):
        all_of.update(scrape(c, process_id))
    return all_of


def table_of(series):
    """A row each; what a label may be is listed where it is a few words."""
    text = INTRO
    for role in ("router", "prefill", "decode", "kvstore"):
        text += f"## tandem-{role}\n\n| name | type | labels | |\n|---|---|---|---|\n"
        for name, (kind, help_text, labels) in sorted(series.items()):
            if name.startswith(f"tandem_{role}_"):
                label = ", ".join(f"`{key}`" for key in sorted(labels))
                said = help_text.rstrip(".")
                text += f"| `{name}` | {kind} | {label} | {said[:1].lower()}{said[1:]} |\n"
        text += "\n"
    return text.rstrip("\n") + "\n"


@test
def test_the_table_has_every_series_and_no_other(options):
    text = table_of(exported(options))
    if options.write:
        with open(TABLE, "w", encoding="utf-8") as file:
            file.write(text)
    with open(TABLE, encoding="utf-8") as file:
        written = file.read()
    missing = sorted(set(text.splitlines()) - set(written.splitlines()))
    surplus = sorted(set(written.splitlines()) - set(text.splitlines()))
    assert not missing and not surplus, f"missing: {missing}\nsurplus: {surplus}\nsee --write"


def expressions():
    """(where, PromQL) of all alerts and panels."""
    with open(os.path.join(FOLDER, "rules.yaml"), encoding="utf-8") as file:
        rules = file.read()
    for name, block in re.findall(r"- alert: (\w+)\n(.*?)(?=\n      - alert:|\Z)", rules, re.S):
        found = re.search(r"expr: (?:\|\n)?(.*?)\n        (?:for|labels):", block, re.S)
        yield name, found.group(1)
    with open(os.path.join(FOLDER, "dashboard.json"), encoding="utf-8") as file:
        for panel in json.load(file)["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"]


@test
def test_alerts_and_dashboard_ask_for_what_there_is(options):
    series = exported(options)
    names = {name + suffix for name, (kind, _, _) in series.items() if kind == "histogram"
             for suffix in HISTOGRAM} | set(series)
    asked = list(expressions())
    assert len(asked) > 30
    for where, text in asked:
        found = re.findall(r"tandem_\w+", re.sub(r'"[^"]*"', "", text))
        patterns = re.findall(r'__name__=~"([^"]*)"', text)
        assert found or patterns, (where, text)
        for name in found:
            assert name in names, (where, name)
        for pattern in patterns:
            assert any(re.fullmatch(pattern, name) for name in names), (where, pattern)
        for name, matchers in re.findall(r"(tandem_\w+)\{([^}]*)\}", text):
            labels = series[name][2]
            for label, _, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers):
                assert label in labels, (where, name, label)
                for one in value.split("|"):
                    assert one in labels[label], (where, name, label, one, labels[label])
        for inside in re.findall(r"by \(([^)]*)\)", text):
            for label in inside.split(", "):
                assert label in PROMQL or any(label in series[name][2] for name in found
                                              if name in series), (where, label)


@test
def test_every_alert_has_its_line_in_the_runbook(options):
    with open(os.path.join(FOLDER, "rules.yaml"), encoding="utf-8") as file:
        rules = file.read()
    with open(os.path.join(FOLDER, "runbook.md"), encoding="utf-8") as file:
        sections = dict(re.findall(r"^## (\w+)\n\n(.+)$", file.read(), re.M))
    alerts = re.findall(r"alert: (\w+)", rules)
    assert sorted(alerts) == sorted(sections), set(alerts) ^ set(sections)
    links = re.findall(r"runbook: runbook\.md#(\w+)", rules)
    assert links == [alert.lower() for alert in alerts]
    assert rules.count("summary:") == len(alerts)


@test
def test_the_guides_speak_of_what_there_is(options):
    """Series and options that the operations guide and the threat model name."""
    with open(os.path.join(FOLDER, "METRICS.md"), encoding="utf-8") as file:
        known = set(re.findall(r"`(tandem_[a-z_]+)", file.read()))
    said = ""
    for program in ("router", "prefill", "decode", "kvstore", "sim"):
        said += subprocess.run([os.path.join(options.bin, f"tandem-{program}"), "--help"],
                               stdout=subprocess.PIPE, check=True).stdout.decode()
    for command in (["tandemctl"], ["tandem-bench", "serve"], ["tandem-train-heads"]):
        said += subprocess.run([os.path.join(options.bin, command[0]), *command[1:], "--help"],
                               stdout=subprocess.PIPE, check=True).stdout.decode()
    flags = set(re.findall(r"--[a-z][a-z-]*", said))
    for name in ("OPERATIONS.md", "SECURITY.md", "monitoring/runbook.md"):
        with open(os.path.join(os.path.dirname(FOLDER), name), encoding="utf-8") as file:
            text = file.read()
        wrong = {s for s in re.findall(r"`(tandem_[a-z_]+)", text) if s not in known}
        wrong |= {f for f in re.findall(r"--[a-z][a-z-]+", text) if f not in flags and f != "--etcd-"}
        assert not wrong, (name, wrong)


@test
def test_prometheus_takes_the_rules(options):
    if shutil.which("promtool") is None:
        raise Skip("promtool is needed (Debian's package prometheus)")
    done = subprocess.run(["promtool", "check", "rules", os.path.join(FOLDER, "rules.yaml")],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout.decode()


if __name__ == "__main__":
    main(__doc__, lambda parser: parser.add_argument("--write", action="store_true"))
