"""KV codecs through the whole cluster: bit-equal to one process, cold, again and from caches; and who
stores KV another way is refused."""
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import Cluster, main, test
from one_process import MODEL, ask, one_process, reference_prompts

STEPS = 12
BYTES_PER_TOKEN = {"f16": 23040, "f8_e4m3": 12240, "i8": 12240, "f4_e2m1": 6480}


def prompts():
    """id lists: under a block, and several blocks with a partial one."""
    return reference_prompts("v00", "v10", "v15", "v20")


def computed(options, codec):
    return one_process(options, prompts(), STEPS, "--kv-codec", codec)


def ask_all(cluster, **parameters):
    """[(ids, hashes)] of greedy completions, and how many prompt tokens came from caches."""
    answers, cached = [], 0
    for ids in prompts():
        answer, known = ask(cluster, ids, STEPS, **parameters)
        answers.append(answer)
        cached += known
    return answers, cached


def check_codec(options, codec):
    expected = computed(options, codec)
    with Cluster(options.bin, prefill=2, decode=2, kv_codec=codec,
                 router_args=["--allow-placement"]) as c:
        for node in ("prefill-1", "decode-2"):
            assert f"codec={codec} bytes_per_token={BYTES_PER_TOKEN[codec]} " in c.log(node)
        first = {"prefill": "prefill-1", "decode": "decode-1"}
        cold, cold_cached = ask_all(c, tandem=first)  # the prompts may share a first block
        assert cold == expected
        again, cached = ask_all(c, tandem=first)
        assert again == expected
        assert cached > cold_cached, "the second run is of cached prefixes"
        full = sum(len(ids) // 16 for ids in prompts())
        c.wait_until(lambda: c.metrics("kvstore-1")["tandem_kvstore_keys"] >= full, 10,
                     "blocks in the store")
        stored, cached = ask_all(c, tandem={"prefill": "prefill-2", "decode": "decode-2"})
        assert stored == expected
        assert cached > 0
        series = c.metrics("prefill-2")
        assert series['tandem_prefill_prompt_tokens_total{source="store"}'] > 0
        assert series["tandem_prefill_checksum_failures_total"] == 0
    return expected


@test
def test_i1_i8_blocks_through_the_cluster(options):
    assert check_codec(options, "i8") != computed(options, "f16"), "the codec is used"


@test
def test_i1_f8_blocks_through_the_cluster(options):
    assert check_codec(options, "f8_e4m3") != computed(options, "i8")


@test
def test_i1_f4_blocks_through_the_cluster(options):
    check_codec(options, "f4_e2m1")


@test
def test_i1_codec_from_the_environment(options):
    """local.sh without --kv-codec leaves the choice to the programs' other sources."""
    with Cluster(options.bin, kvstore=0, router_args=["--allow-placement"],
                 env={"TANDEM_KV_CODEC": "i8"}) as c:
        assert ask_all(c)[0] == computed(options, "i8")


@test
def test_nodes_of_another_codec_are_refused(options):
    with Cluster(options.bin, kvstore=0, kv_codec="i8", kv_memory="256M") as c:
        # The same size of block, so that nothing but the name of the codec tells them apart.
        c.expect_refused(["--model", MODEL, "--kv-memory", "64M", "--kv-codec", "f8_e4m3"],
                         "wrong KV codec", "f8_e4m3", "i8")
        assert not any("stranger" in node for node in c.nodes())
        assert c.chat("Hello!", max_tokens=4).text


@test
def test_a_wrong_codec_is_told_the_names(options):
    for program in ("router", "prefill", "decode"):
        done = subprocess.run([os.path.join(options.bin, f"tandem-{program}"), "--kv-codec", "q8"],
                              capture_output=True, text=True, check=False)
        assert done.returncode == 2, done
        assert "kv-codec" in done.stderr and "'q8'" in done.stderr
        assert "f16|f8_e4m3|i8|f4_e2m1" in done.stderr, done.stderr


if __name__ == "__main__":
    main(__doc__)
