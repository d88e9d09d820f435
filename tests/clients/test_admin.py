#!/usr/bin/env python3
"""The admin RPC, by a Python client and by tandemctl: both see and do the same."""
import json
import os
import re
import signal
import stat
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import client_venv  # noqa: E402

client_venv.enter(__file__)

import zmq  # noqa: E402

from admin import Admin, Refused, keys_of  # noqa: E402
from cluster import ROOT, Cluster, main, shared, test, wait_until  # noqa: E402

TRACE = os.path.join(ROOT, "tests/data/conversation_trace_head.jsonl")
PROMPT = "The lighthouse keeper wrote a letter about the storm of that winter. " * 6


def cluster(options):
    return shared(options, prefill=1, decode=2, kvstore=1, router_args=["--allow-placement"])


def ctl(c, *args, code=0):
    done = subprocess.run([os.path.join(c.bin, "tandemctl"), "--keys", keys_of(c), *args],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, timeout=30)
    assert done.returncode == code, (args, done.returncode, done.stderr.decode())
    return done.stdout.decode() if code == 0 else done.stderr.decode()


def refusal(ask):
    """The code of the answer to what the router must refuse."""
    try:
        ask()
    except Refused as why:
        return why.code
    raise AssertionError("it was taken")


def served_by(c):
    """Decode nodes of a few requests."""
    return {c.complete(f"{i}", max_tokens=2).headers["x-tandem-decode"] for i in range(6)}


@test
def test_status_and_nodes_are_the_routers(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    before = admin.status()
    c.complete(PROMPT, max_tokens=5)
    status = admin.status()
    assert status.model == c.model and status.block_tokens == 16
    counts = {count.name: count.count for count in status.requests}
    assert counts["ok"] == {each.name: each.count for each in before.requests}["ok"] + 1
    assert status.completion_tokens == before.completion_tokens + 5
    nodes = admin.nodes()
    assert set(nodes) == set(c.ids()) - {"router"}, nodes
    assert all(node.state == admin.pb.LIVE for node in nodes.values())
    assert nodes["kvstore-1"].store_master and not nodes["decode-1"].store_master
    assert "memo" in nodes["decode-1"].drafters
    shown = json.loads(ctl(c, "--json", "nodes"))["nodes"]
    assert {node["id"]: node["incarnation"] for node in shown} == \
           {node.id: f"{node.incarnation:016x}" for node in nodes.values()}
    assert json.loads(ctl(c, "--json", "status"))["model"] == c.model
    table = ctl(c, "nodes")
    assert all(node in table for node in nodes) and "kvstore (master)" in table
    admin.close()


@test
def test_a_drained_node_gets_nothing_new_until_it_is_undrained(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    # In turn: by predictions all may go to one, where the other was slow once on a busy machine.
    ctl(c, "policy", "round_robin")
    admin.drain("decode-1")
    assert admin.nodes()["decode-1"].drained
    assert served_by(c) == {"decode-2"}
    assert ctl(c, "undrain", "decode-1") == "done\n"
    assert "by order" not in ctl(c, "nodes")
    assert served_by(c) == {"decode-1", "decode-2"}
    ctl(c, "drain", "decode-2")
    c.restart("decode-2", signal.SIGTERM)  # another life of it stays drained
    wait_until(lambda: admin.nodes()["decode-2"].silent_ms < 1000, 10, "decode-2 is back")
    assert served_by(c) == {"decode-1"}
    admin.drain("decode-2", False)
    for node, code in (("decode-9", admin.pb.NOT_FOUND), ("kvstore-1", admin.pb.INVALID)):
        assert refusal(lambda node=node: admin.drain(node)) == code
    assert "no such node" in ctl(c, "drain", "decode-9", code=1)
    ctl(c, "policy", "kv_aware")
    admin.close()


@test
def test_blocks_are_pinned_and_evicted_by_prompt_and_by_key(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    prompt = f"Pinned. {PROMPT}"
    keys_before = c.metrics("kvstore-1")["tandem_kvstore_keys"]
    c.complete(prompt, max_tokens=2)
    tokens = c.request("POST", "/tokenize", {"model": c.model, "prompt": prompt,
                                             "add_special_tokens": False}, check=True).json["tokens"]
    blocks = len(tokens) // 16
    wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= keys_before + blocks, 10,
               "the prompt's blocks are in the store")
    pinned = admin.store(admin.pb.PIN_HARD, prompt=prompt)
    assert list(pinned.statuses) == [0] * blocks and len(pinned.keys) == 16 * blocks
    same = admin.store(admin.pb.PIN_SOFT, tokens=tokens)
    assert same.keys == pinned.keys
    assert f"{blocks} of {blocks} blocks done" in ctl(c, "unpin", "--prompt", prompt)
    gone = admin.store(admin.pb.EVICT, keys=pinned.keys[-32:])
    assert list(gone.statuses) == [0, 0]
    again = json.loads(ctl(c, "--json", "evict", "--key", pinned.keys[-16:].hex()))
    assert again["done"] == 0 and again["blocks"][0]["key"] == pinned.keys[-16:].hex()
    other = admin.store(admin.pb.UNPIN, prompt=prompt, cache_salt=b"another tenant's")
    assert 0 not in list(other.statuses) and other.keys != pinned.keys
    for wrong in ({"prompt": "short"}, {"keys": b"17 bytes are odd."}, {}):
        assert refusal(lambda what=wrong: admin.store(admin.pb.PIN_HARD, **what)) == \
               admin.pb.INVALID
    admin.close()


@test
def test_speculation_is_shown_and_its_policy_set(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    c.complete(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
    wait_until(lambda: admin.speculation().reports > 0, 10, "drafts are reported")
    entry = admin.speculation().entries[-1]
    assert len(entry.steps) == 16 and entry.tokens_per_step >= 1
    assert admin.speculation(explore=17).explore_percent == 17
    assert json.loads(ctl(c, "--json", "speculation"))["explore_percent"] == 17
    assert "explores 5 %" in ctl(c, "speculation", "--explore", "5")
    assert refusal(lambda: admin.speculation(explore=101)) == admin.pb.INVALID
    admin.close()


@test
def test_the_policy_of_placement_is_set(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    assert admin.policy().policy == "kv_aware" and "random" in admin.policy().known
    assert admin.policy("round_robin").policy == "round_robin"
    assert [c.complete("Hi", max_tokens=1).headers["x-tandem-decode"] for _ in range(4)] in (
        ["decode-1", "decode-2"] * 2, ["decode-2", "decode-1"] * 2)
    assert "* least_loaded" in ctl(c, "policy", "least_loaded")
    assert json.loads(ctl(c, "--json", "policy", "kv_aware"))["policy"] == "kv_aware"
    assert "kv_aware|local_aware" in ctl(c, "policy", "nearest", code=1)
    admin.close()


@test
def test_without_keys_all_requests_are_one_tenants(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    before = admin.tenants()
    assert list(before) == ["all"] and before["all"].weight == 1
    c.complete("Hi", max_tokens=3, ignore_eos=True)
    all_of = admin.tenants()["all"]
    counts = {count.name: count.count for count in all_of.requests}
    assert counts["ok"] == {each.name: each.count for each in before["all"].requests}["ok"] + 1
    assert all_of.completion_tokens == before["all"].completion_tokens + 3 and all_of.running == 0
    shown = json.loads(ctl(c, "--json", "tenants"))["tenants"]
    assert [(each["name"], each["requests"]["ok"]) for each in shown] == [("all", counts["ok"])]
    assert ctl(c, "tenants").splitlines()[1].split()[:2] == ["all", "1"]
    admin.close()


@test
def test_objectives_are_set_and_calibration_is_told(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    assert (admin.slo().ttft_ms, admin.slo().tbt_ms) == (0, 0)
    for i in range(3):
        assert c.complete(f"Once upon {i} times", max_tokens=40, ignore_eos=True).status == 200
    assert admin.slo(ttft_ms=1).ttft_ms == 1 and admin.slo().tbt_ms == 0
    refused = c.complete("a word " * 400, max_tokens=2, check=False)
    assert refused.status == 429 and refused.json["error"]["code"] == "slo_ttft"
    assert admin.slo().refused_ttft == 1
    assert c.complete("Hi", max_tokens=2, headers={"x-slo-ttft-ms": "0"}).status == 200
    assert json.loads(ctl(c, "slo", "--ttft", "0", "--tbt", "5000", "--json")) == {
        "ttft_ms": 0, "tbt_ms": 5000, "refused_ttft": 1, "refused_tbt": 0}
    assert "5000 ms" in ctl(c, "slo")
    assert refusal(lambda: admin.slo(ttft_ms=1 << 31)) == admin.pb.INVALID
    admin.slo(tbt_ms=0)
    told = admin.calibration()
    assert told.prefills > 0 and told.decodes > 0 and told.prefill_token_us > 0
    assert told.layers == 30 and told.kv_token_bytes == 23040 and told.decode_kv_tokens > 1000
    path = os.path.join(c.run_dir, "calibration.json")
    with open(path, "w", encoding="ascii") as file:
        file.write(ctl(c, "calibration", "--json"))
    simulated = subprocess.run(
        [os.path.join(c.bin, "tandem-sim"), "--trace", TRACE, "--requests", "20", "--calibration",
         path, "--prefill", "1", "--decode", "1", "--json"], capture_output=True, text=True,
        check=True)
    assert json.loads(simulated.stdout)["ttft_mean_s"] > 0
    admin.close()


@test
def test_a_requests_placement_is_traced(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    reply = c.complete(f"Traced. {PROMPT}", max_tokens=9, ignore_eos=True, temperature=0)
    name = reply.headers["x-request-id"]
    decision, = admin.trace(name)
    assert decision.prefills[0].node == reply.headers["x-tandem-prefill"]
    assert decision.decodes[0].node == reply.headers["x-tandem-decode"]
    assert {each.node for each in decision.decodes} == {"decode-1", "decode-2"}
    assert decision.decode_nodes == 2 and decision.prompt_tokens == reply.usage["prompt_tokens"]
    assert (decision.attempt, decision.end, decision.tokens) == (1, "ok", 9)
    drafter, bounds, why, kind = reply.headers["x-tandem-draft"].split()
    assert (decision.drafter, f"k={decision.k_min}-{decision.k_max}", decision.draft_why,
            decision.prompt_class) == (drafter, bounds, why, kind)
    again = c.complete(f"Traced. {PROMPT}", max_tokens=1).headers["x-request-id"]
    cached, = admin.trace(again)
    assert cached.prefills[0].own_tokens >= 16 and cached.prefills[0].ttft_ms > 0
    assert [each.request for each in admin.trace(most=2)] == [name, again]
    shown = json.loads(ctl(c, "--json", "trace", name))
    assert shown["decodes"][0]["score"] == decision.decodes[0].score
    assert f"* decode  {decision.decodes[0].node}" in ctl(c, "trace", name)
    assert "no decision" in ctl(c, "trace", "nobody", code=1)
    admin.close()


@test
def test_events_come_in_order_and_as_they_happen(options):
    with Cluster(options.bin, prefill=1, decode=2, kvstore=0,
                 router_args=["--allow-placement"]) as c:
        admin = Admin(keys_of(c))
        past = admin.subscribe(since=1, lease_ms=60000)
        assert {event.node for event in past.events if event.kind == "node_up"} == \
               {"prefill-1", "decode-1", "decode-2"}
        assert [event.number for event in past.events] == list(range(1, len(past.events) + 1))
        stream = c.complete(PROMPT, stream=True, max_tokens=80, temperature=0, ignore_eos=True,
                            tandem={"decode": "decode-2"})
        events = iter(stream)
        next(events)
        c.kill("decode-2")
        assert len(list(events)) > 0 and stream.done
        seen, number = [], past.events[-1].number
        while "failover" not in [event.kind for event in seen]:
            for event in admin.receive(10).events.events:
                assert event.number == number + 1
                number += 1
                seen.append(event)
        down, over = [next(e for e in seen if e.kind == k) for k in ("node_down", "failover")]
        assert down.node == over.node == "decode-2" and over.request.startswith("cmpl-")
        shown = [json.loads(line) for line in ctl(c, "--json", "events").splitlines()]
        assert [event["number"] for event in shown] == list(range(1, number + 1))
        assert ctl(c, "events", "--since", str(down.number)).splitlines()[0].split()[2] == "node_down"
        later = admin.subscribe(since=number + 1000)  # a number of an earlier life
        assert [event.number for event in later.events] == list(range(1, number + 1))
        many = [Admin(keys_of(c)) for _ in range(16)]
        # With the one above they are seventeen.
        assert refusal(lambda: [each.subscribe(lease_ms=60000) for each in many]) == admin.pb.BUSY
        for each in [admin, *many]:
            each.close()


@test
def test_who_is_not_on_the_list_is_not_heard(options):
    c = cluster(options)
    folder = keys_of(c)
    for name in ("router.key", "admin.key", "allow"):
        assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600
    _, secret = zmq.curve_keypair()
    stranger = Admin(folder, secret=secret.decode())
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    with open(os.path.join(folder, "endpoint"), encoding="ascii") as file:
        plain.connect(file.read().strip())
    stranger.send(status=stranger.pb.StatusRequest())
    plain.send(stranger.pb.Request(id=1).SerializeToString())
    assert not stranger.socket.poll(1000) and not plain.poll(10)
    plain.close()
    stranger.close()
    known = Admin(folder)
    assert known.status().model == c.model
    known.close()


@test
def test_what_is_no_request_is_refused_and_hurts_nobody(options):
    c = cluster(options)
    admin = Admin(keys_of(c))
    for bad in (b"\xff" * 100, b"\x08", os.urandom(5000), b"\x52\xff\xff\xff\xff\x0f"):
        admin.socket.send(bad)
        assert admin.receive().code == admin.pb.INVALID
    admin.socket.send_multipart([b"", b"x", b"y"])
    assert admin.receive().code == admin.pb.INVALID
    admin.socket.send(admin.pb.Request(id=9).SerializeToString())
    reply = admin.receive()
    assert reply.id == 9 and reply.code == admin.pb.INVALID and "command" in reply.error
    try:
        for _ in range(3000):  # without reading one answer
            admin.socket.send(os.urandom(200), zmq.DONTWAIT)
    except zmq.Again:
        pass  # it was cut off, as who doesn't answer heartbeats is
    other = Admin(keys_of(c))
    assert other.status().model == c.model
    assert c.complete("Hi", max_tokens=2).status == 200
    huge = Admin(keys_of(c))
    huge.socket.send(b"x" * (1 << 20))  # over the limit: the connection is cut
    assert not huge.socket.poll(500)
    assert other.status().model == c.model
    for each in (admin, other, huge):
        each.close()


@test
def test_orders_that_take_long_do_not_hold_up_requests(options):
    """Forty prompts to hash, each of which takes the router's loop longer than a token takes."""
    c = cluster(options)
    admin = Admin(keys_of(c))
    prompt = "a" * 250000
    ids = [admin.send(store=admin.pb.StoreRequest(action=admin.pb.UNPIN, prompt=prompt))
           for _ in range(40)]
    answered = [admin.receive().id]  # they have begun
    assert c.complete("Hi", max_tokens=2).status == 200
    while admin.socket.poll(0):
        answered.append(admin.receive().id)
    assert len(answered) < 32, len(answered)
    while len(answered) < len(ids):
        answered.append(admin.receive().id)
    assert sorted(answered) == ids
    admin.close()


@test
def test_keys_are_made_all_or_none(options):
    """A folder with a list of clients, but no key of the router's: the list stays the operator's."""
    c = cluster(options)
    folder = os.path.join(c.run_dir, "half")
    os.mkdir(folder, 0o700)
    with open(os.path.join(folder, "allow"), "w", encoding="ascii") as file:
        file.write("# nobody yet\n")
    with open(f"/proc/{c.pids()['router']}/cmdline", encoding="utf-8") as file:
        command = file.read().split("\0")[:-1]
    for option, value in (("--http", "127.0.0.1:0"), ("--listen", "tcp://127.0.0.1:*"),
                          ("--admin-keys", folder)):
        command[command.index(option) + 1] = value
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=c.env,
                          check=False, timeout=60)
    assert done.returncode != 0 and b"File exists" in done.stdout, done.stdout
    assert os.listdir(folder) == ["allow"]


@test
def test_tandemctl_says_what_is_wrong(options):
    c = cluster(options)
    for args, text in ((("nonsense",), "no such command: nonsense"), ((), "a command is expected"),
                       (("drain",), "one name is expected"), (("pin",), "--prompt"),
                       (("pin", "--key", "abc"), "32 hexadecimal digits"),
                       (("speculation", "--explore", "x"), "0 to 100"),
                       (("--watch", "0", "nodes"), "0.1")):
        assert text in ctl(c, *args, code=2), args
    help_text = ctl(c, "--help")
    assert all(name in help_text for name in ("drain NODE", "--json", "--watch"))
    hollow = os.path.join(c.run_dir, "hollow")
    os.mkdir(hollow)
    assert "hollow/router.pub: No such file" in ctl(c, "--keys", hollow, "nodes", code=1)
    with open(os.path.join(hollow, "router.pub"), "w", encoding="ascii"):
        pass
    assert "hollow/router.pub: a line of text is expected" in ctl(c, "--keys", hollow, "nodes", code=1)
    key = os.path.join(c.run_dir, "other.key")
    public = ctl(c, "keygen", key).strip()
    with open(key, encoding="ascii") as file:
        assert zmq.curve_public(file.read().strip().encode()).decode() == public
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert "exists" in ctl(c, "keygen", key, code=1)


@test
def test_completion_and_manual_page_know_all_that_help_does(options):
    c = cluster(options)
    help_text = ctl(c, "--help")
    own = [name for name in re.findall(r"--[a-z-]+", help_text) if "admin" not in name]
    names = own + ["status", "nodes", "drain", "undrain", "pin", "unpin", "evict", "speculation", "policy", "slo",
                   "tenants", "calibration", "trace", "events", "keygen", "apikey"]
    deploy = os.path.join(client_venv.ROOT, "deploy")
    with open(os.path.join(deploy, "tandemctl.1"), encoding="utf-8") as file:
        page = file.read().replace("\\-", "-")
    assert [name for name in names if name not in page] == []

    def completed(*words):
        script = (f'source "{deploy}/tandemctl.bash"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
                  '_tandemctl; printf "%s\\n" "${COMPREPLY[@]}"')
        program = os.path.join(c.bin, "tandemctl")
        return subprocess.run(["bash", "-c", script, "bash", program, *words], check=True,
                              stdout=subprocess.PIPE).stdout.decode().split()

    assert sorted(completed("") + completed("--")) == sorted(set(names))
    assert sorted(completed("--keys", keys_of(c), "drain", "dec")) == ["decode-1", "decode-2"]
    assert completed("ev") == ["evict", "events"]


if __name__ == "__main__":
    main(__doc__)
