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


if __name__ == "__main__":
    main(__doc__)
