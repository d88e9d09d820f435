"""What a single process computes, which answers of clusters are compared with bit for bit (I1)."""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cluster import ROOT  # noqa: E402

MODEL = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def reference_prompts(*names):
    """id lists of the reference texts with these names: v00 is under a block, v21 hundreds of tokens."""
    with open(os.path.join(ROOT, "tests/data/reference_smollm2.jsonl"), encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    return [job["ids"] for job in jobs if job["id"] in names]


def one_process(options, prompts, steps, *flags, model=MODEL):
    """[(ids, hashes)] of tandem-bench eval, which never gives a block up."""
    jobs = "".join(json.dumps({"id": str(i), "ids": ids, "gen": steps, "topk": 0, "hashes": True}) + "\n"
                   for i, ids in enumerate(prompts))
    out = subprocess.run([os.path.join(options.bin, "tandem-bench"), "eval", "--model", model,
                          "--threads", "2", *flags],
                         input=jobs, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in out.stdout.splitlines()]
    return [(result["greedy"], result["logits_xxh"]) for result in results]


def ask(cluster, ids, steps, **parameters):
    """(ids, hashes) of a greedy completion, and how many prompt tokens came from caches."""
    reply = cluster.complete(ids, max_tokens=steps, temperature=0, **parameters)
    tandem = reply.json["tandem"]
    return ((tandem["tokens"][0], tandem["logits_xxh"][0]),
            reply.usage["prompt_tokens_details"]["cached_tokens"])
