"""A cluster over several hosts, as README.md says it: each host a network namespace, tcp between them.
test_cluster_hosts.py has larger ones."""
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import main, test, wait_until
from hosts import HostCluster

ARGS = {"router": ["--allow-placement", "--self-prefill-tokens", "0"],
        "kvstore": ["--capacity", "64M"], "prefill": ["--kv-memory", "64M"],
        "decode": ["--kv-memory", "64M"]}


@test
def test_hosts_serve_over_curve_and_tcp(options):
    with HostCluster(options, args=ARGS) as c:
        def ask():
            reply = c.complete("The hosts said to each other that " * 6, max_tokens=24, temperature=0)
            assert reply.usage["completion_tokens"] == 24
            return reply.choices, reply.json["tandem"]["logits_xxh"]

        first = ask()
        assert ask() == first
        assert "carrier=tcp" in c.log("decode-1") and "carrier=shm" not in c.log("decode-1")
        # A process with another secret is not part of it, and harms nobody.
        other = os.path.join(c.run_dir, "other.secret")
        with open(os.open(other, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(32))
        c.place("prefill", "stranger")
        c.commands["stranger"] = [other if word.endswith("cluster.secret") else word
                                  for word in c.command_of("stranger")]
        c.start("stranger")
        assert ask() == first
        assert "stranger" not in c.nodes()


@test
def test_a_cut_link_is_noticed_and_answered(options):
    with HostCluster(options, args=ARGS) as c:
        assert c.complete("word " * 600, max_tokens=4).text
        c.host("prefill-1").cut()
        started = time.monotonic()
        reply = c.complete("other " * 600, max_tokens=4, check=False)
        assert reply.status in (502, 503) and reply.json["error"]["message"], reply.body
        assert time.monotonic() - started < 10
        c.host("prefill-1").mend()
        wait_until(lambda: c.complete("other " * 600, max_tokens=4, check=False).status == 200, 30,
                   "everybody is back")


@test
def test_f7_revoked_offers_give_their_space_back_behind_a_slow_link(options):
    args = {**ARGS, "router": ["--self-prefill-tokens", "2000"],
            "kvstore": ["--capacity", "64M", "--put-abandoned-ms", "1500"]}
    with HostCluster(options, kvstore=1, args=args) as c:
        def says(series):
            return c.metrics("kvstore-1")[f"tandem_kvstore_{series}"]
        c.complete("Hi", max_tokens=1)
        c.host("decode-1").slow("4mbit")  # what it offers then takes 30 s
        with c.complete("The ferrymen kept a book of every crossing in fog. " * 50, max_tokens=400,
                        ignore_eos=True, stream=True):
            wait_until(lambda: says('puts_total{result="revoked"}') > 5, 20, "offers are revoked")
        wait_until(lambda: says('kv_blocks{state="active"}') == 0, 4, "their space is free")
        c.host("decode-1").hasten()


if __name__ == "__main__":
    main(__doc__)
