#!/usr/bin/env python3
"""Breaks the GPU backend on purpose, one place at a time, and expects a named test to notice.

Each mutant is a copy of one source file with one piece of text replaced, compiled and linked in place of
the original. Prints one line for each; exit code 1 where one was not noticed. Run from the repository
root, after the tests are built.
"""
import argparse
import collections
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CUDA = "common/model/cuda"
TRANSFER = "common/transfer"
OUT = "build/mutants"
LIMIT_S = 120
KERNELS = ("attention", "blocks", "gather", "products", "rows")

# file: of the backend's folder, or a path. test: of the executable test_cuda_<first word>; "race" runs the build for ThreadSanitizer.
Mutant = collections.namedtuple("Mutant", "name file old new test")
MUTANTS = [
    Mutant("mask off by one", "td_cuda_math.cuh", "if (p > q) {", "if (p >= q && q > 0) {",
           "attention test_every_length_of_context"),
    Mutant("window off by one", "td_cuda_math.cuh", "query - mask.local + 1", "query - mask.local",
           "attention test_windows_and_strides"),
    Mutant("barrier missing before a tile is read", "td_cuda_attention.cu",
           "load_tile<DIM, THREADS>(p, w, tile);\n            __syncthreads();",
           "load_tile<DIM, THREADS>(p, w, tile);",
           "attention test_every_head_size_and_group"),
    Mutant("barrier missing before a tile is replaced", "td_cuda_attention.cu",
           "__syncthreads(); /* the next tile takes the place of this one */", "",
           "race attention"),
    Mutant("scale left out", "td_cuda_attention.cu", "* p.scale;", "* 1.0f;",
           "attention test_every_codec_and_block_size"),
    Mutant("keys and values swapped when read", "td_cuda_attention.cu",
           "(is_v ? p.kv.half_bytes : 0)", "(is_v ? 0 : p.kv.half_bytes)",
           "attention test_every_codec_and_block_size"),
    Mutant("outputs not rescaled", "td_cuda_attention.cu", "o.acc[e][i] *= w.rescale[query];", ";",
           "attention test_every_length_of_context"),
    Mutant("unseen values added with weight 0", "td_cuda_attention.cu",
           "(WHOLE || weight[j] != 0) && e <", "e <",
           "attention test_every_head_size_and_group"),
    Mutant("block table of another sequence", "td_cuda_attention.cu", "p.tables[w.item.table + ",
           "p.tables[0 * w.item.table + ", "model test_a_batch_is_its_sequences"),
    Mutant("keys and values swapped when written", "td_cuda_rows.cu", "(is_v ? p.v : p.k)",
           "(is_v ? p.k : p.v)", "rows test_rotary_and_kv_write_have_the_bits_of_the_cpu"),
    Mutant("barrier missing behind the sums of a norm", "td_cuda_rows.cu",
           "chains[threadIdx.x] = chain;\n    }\n    __syncthreads();",
           "chains[threadIdx.x] = chain;\n    }",
           "rows test_norm_adds_and_quantises_like_the_cpu"),
    Mutant("chain of another order", "td_cuda_rows.cu", "#define CHAINS 8u", "#define CHAINS 4u",
           "rows test_norm_adds_and_quantises_like_the_cpu"),
    Mutant("copies not waited for", "td_cuda_products.cu", "dev_copy_wait<STAGES - 2>();",
           "dev_copy_wait<STAGES - 1>();", "products test_products_have_the_bits_of_the_cpu"),
    Mutant("barrier missing before a stage is read", "td_cuda_products.cu",
           "dev_copy_wait<STAGES - 2>();\n        __syncthreads();", "dev_copy_wait<STAGES - 2>();",
           "race products"),
    Mutant("low bytes taken as signed", "td_cuda_products.cu", "dev_mma_s8<false>(low",
           "dev_mma_s8<true>(low", "products test_products_are_exact_at_the_limits"),
    Mutant("groups past the end", "td_cuda_products.cu",
           "g < (left < TD_CUDA_CHUNK ? left : TD_CUDA_CHUNK)", "g < TD_CUDA_CHUNK",
           "products test_products_have_the_bits_of_the_cpu"),
    Mutant("rows past the end", "td_cuda_products.cu", "at.there && row < p.rows && output",
           "at.there && row <= p.rows && output", "products test_products_have_the_bits_of_the_cpu"),
    Mutant("ties to the higher token", "td_cuda_blocks.cu", "token < than.token",
           "token > than.token", "draw test_the_device_draws_what_the_sampler_picks"),
    Mutant("changed blocks kept", "td_cuda_mirror.c", "m->places[m->place_of[block]].valid = false;",
           ";", "model test_blocks_that_the_host_changed"),
    Mutant("blocks given out anew taken for the old ones", "td_cuda_mirror.c",
           "p->valid = p->valid && p->epoch == epoch;", ";",
           "model test_random_passes_have_the_bits_of_the_cpu"),
    Mutant("graph of another shape", "td_cuda_graphs.c",
           "memcmp(&e->shape, shape, sizeof(*shape)) == 0", "e->shape.rows == shape->rows",
           "model test_decoding_by_graphs_has_the_bits_of_the_cpu"),
    Mutant("blocks of the pass given away", "td_cuda_mirror.c", "p->pass == m->pass", "false",
           "mirror test_a_pass_keeps_what_it_took"),
    Mutant("blocks not brought back", "td_cuda_plan.c",
           "uploads = !valid && (!fresh || !d->mapped);",
           "uploads = !valid && fresh;", "model test_blocks_come_and_go"),
    Mutant("another's KV sent behind the rows of a pass", "td_cuda_plan.c",
           "uploads = !valid && (!fresh || !d->mapped);", "uploads = !valid && !fresh;",
           "model test_layers_are_announced_when_they_are_with_the_host"),
    Mutant("host's blocks written at the device's places", "td_cuda_rows.cu",
           "store_in_block(p.host, p.host_blocks[b],", "store_in_block(p.host, 0 * p.blocks[b],",
           "model test_every_weight_type_and_precision"),
    Mutant("layers sent before they are computed", "td_cuda_pass.c",
           'TD_TRY(td_cuda_check(cudaStreamWaitEvent(rank->out, rank->computed[turn], 0),\n'
           '                         "cudaStreamWaitEvent"));', "",
           "model test_layers_are_announced_when_they_are_with_the_host"),
    Mutant("layers announced before they have left", "td_cuda_pass.c",
           'TD_TRY(td_cuda_check(cudaEventSynchronize(d->ranks[r].left[turn]), '
           '"cudaEventSynchronize"));', "",
           "model test_layers_are_announced_when_they_are_with_the_host"),
    Mutant("logits not waited for", "td_cuda_pass.c",
           'TD_TRY(td_cuda_check(cudaStreamSynchronize(d->ranks[r].compute), '
           '"cudaStreamSynchronize"));', "", "model test_a_batch_is_its_sequences"),
    Mutant("staging filled while it is read", "td_cuda_rank.c",
           'TD_TRY(td_cuda_check(cudaEventSynchronize(rank->staged[turn]), "cudaEventSynchronize"));',
           "", "reference test_the_model_writes_the_references_text"),
    Mutant("a device that rounds otherwise", "td_cuda_math.cuh", "poly = fmaf(poly, rest, 1.0f);",
           "poly = poly * rest + 1.0f;", "model test_first_layers_only"),
    Mutant("blocks not sent to the host", "td_cuda_pass.c",
           "!d->mapped && i < d->written_count; i++) {",
           "!d->mapped && i + 1 < d->written_count; i++) {",
           "model test_layers_are_announced_when_they_are_with_the_host"),
    Mutant("a device does not wait for the others", "td_cuda_gather.c",
           "d->phases > 0 && s < d->rank_count", "d->phases > 0 && s < r",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("a device does not wait for those behind it", "td_cuda_gather.c",
           "d->phases > 0 && s < d->rank_count", "d->phases > 0 && s + 1 < d->rank_count",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("a device has no access to another's memory", "td_cuda_gather.c",
           "error = cudaDeviceEnablePeerAccess(peer->index, 0);", "",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("launches to a device that is not chosen", "td_cuda_gather.c",
           "if (!alone) {\n            TD_TRY(td_cuda_rank_choose(rank));", "if (false) {",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("another's memory read where it cannot be", "td_cuda_gather.c",
           "*reads_out = can != 0;", "*reads_out = true;",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("a graph does not wait for the plan on every device", "td_cuda_pass.c",
           "TD_TRY(td_cuda_join(d, 0));", "",
           "model test_decoding_by_graphs_has_the_bits_of_the_cpu_on_two_devices"),
    Mutant("a graph ends before the devices behind the first", "td_cuda_pass.c",
           "TD_TRY(td_cuda_join(p->d, 1));", "",
           "model test_decoding_by_graphs_has_the_bits_of_the_cpu_on_two_devices"),
    Mutant("a buffer written again while it is gathered from", "td_cuda_rank.c",
           "TD_TRY(take_floats(rank, rows, m->info.embed_dim, &rank->y_own));",
           "rank->y_own = rank->attn;", "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("parts of another row gathered", "td_cuda_gather.cu",
           "piece.from[(size_t)row * piece.width + inside]", "piece.from[inside]",
           "gather test_floats_come_together_and_are_quantised"),
    Mutant("rows of tokens gathered from the first device", "td_cuda_gather.cu",
           "? i : p.tokens[row];", "? i : 0 * p.tokens[row];",
           "gather test_rows_come_from_who_has_their_token"),
    Mutant("embeddings of another device's tokens", "td_cuda_rows.cu", "p.tokens[row] - p.first;",
           "p.tokens[row] - 0 * p.first;", "rows test_embedding_is_the_files_numbers"),
    Mutant("scales not gathered", "td_cuda_gather.cu",
           "p.out.sum[to / TD_CUDA_GROUP] = acts.sum[from / TD_CUDA_GROUP];", "",
           "gather test_quantised_pieces_come_together"),
    Mutant("groups that cross devices quantised in parts", "td_cuda_gather.c",
           "piece.begin % TD_CUDA_GROUP != 0 || piece.width % TD_CUDA_GROUP != 0", "false",
           "devices test_every_weight_type_and_precision"),
    Mutant("all devices' heads written as the first ones", "td_cuda_pass.c",
           ".host_head = rank->share.kv_heads.begin,", ".host_head = 0,",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("a device has other heads' outputs of v", "td_cuda_rank.c",
           "load_matrix(rank, &from->v, times(share->kv_heads, head_dim), &to->v)",
           "load_matrix(rank, &from->v, times((td_cuda_range_t){0, td_cuda_width(share->kv_heads)}, "
           "head_dim), &to->v)", "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("other heads of a block sent to a device", "td_cuda_heads.c",
           "td_kv_offset(whole, begin, false, first, 0)", "td_kv_offset(whole, begin, false, 0, 0)",
           "devices test_two_devices_have_the_bits_of_the_cpu"),
    Mutant("blocks with tokens missing sent from the device", "td_cuda_mirror.c",
           "pinned = p->valid && p->exact &&", "pinned = p->valid &&",
           "model test_copies_that_are_sent_are_the_hosts_blocks"),
    Mutant("blocks sent before they are uploaded", "td_cuda_mirror.c",
           "!(m->running && p->uploaded && p->pass == m->pass) && pin(m, p)", "pin(m, p)",
           "nccl test_copies_of_the_device_are_sent"),
    Mutant("pieces of a copy that do not follow each other", "td_cuda_mirror.c",
           "p->epoch == epoch && p->landed == offset && pin(m, p)",
           "p->epoch == epoch && pin(m, p)", "mirror test_copies_that_come_in_pieces"),
    Mutant("a receive over before the device knows of it", "td_cuda_exchange.c",
           "if (error == ncclInProgress) {", "if (false) {", "nccl test_whole_blocks"),
    Mutant("copies that no checksum was compared with", f"{TRANSFER}/td_transfer_nccl.c",
           "        forget_copies(n, fetch);\n", "",
           "nccl test_copies_of_a_fetch_that_fell_back_are_not_used"),
    Mutant("staging given away while NCCL may write it", f"{TRANSFER}/td_transfer_nccl.c",
           "if (op->state == OP_POSTED) {", "if (false) {",
           "nccl test_staging_is_quarantined_until_the_abort_ends"),
    Mutant("blocks of another allocation sent", f"{TRANSFER}/td_transfer_nccl.c",
           "if (td_pool_epoch(pool, op->parts[i].block) != op->parts[i].epoch) {", "if (false) {",
           "nccl test_another_allocation_is_stale"),
    Mutant("posts in an order of each end's own", f"{TRANSFER}/td_transfer_nccl.c",
           "if (p->rank == 0) {\n        take_turn(p, op);", "if (true) {\n        take_turn(p, op);",
           "nccl test_several_peers_in_both_directions"),
    Mutant("a link given up while its ends connect", f"{TRANSFER}/td_transfer_nccl.c",
           "const bool connects = p->heard_ns == 0 &&", "const bool connects = p == NULL &&",
           "nccl test_slow_first_chunks_end_no_link"),
]


class Failure(Exception):
    """What kept a mutant from being judged."""


def run(command, limit_s=600):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s,
                          check=False)
    return done.returncode, done.stdout.decode(errors="replace")


def must(command):
    code, output = run(command)
    if code != 0:
        raise Failure(f"{' '.join(command)[:200]}\n{output[-2000:]}")
    return output


def make_variable(name):
    return must(["make", "-s", "CONFIG=test", f"--eval=print-it: ; @echo '$({name})'", "print-it"]).strip()


def source_of(mutant):
    return mutant.file if "/" in mutant.file else os.path.join(CUDA, mutant.file)


class Builder:
    """Compiles and links mutants as the Makefile does the originals."""

    def __init__(self, binaries):
        self.binaries = binaries
        self.compiler = make_variable("EMU_CXX")
        self.headers = make_variable("CUDA_INC")

    def mutate(self, mutant, folder):
        source = source_of(mutant)
        with open(source, encoding="utf-8") as file:
            text = file.read()
        if mutant.old not in text:
            raise Failure(f"{mutant.file} has no longer the text {mutant.old!r}")
        path = os.path.join(folder, source)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace(mutant.old, mutant.new))
        return path

    def compile(self, mutant, folder, race):
        """Objects in place of the originals: {original's variable: objects}."""
        path = self.mutate(mutant, folder)
        device = "build/emu-race" if race else "build/emu"
        if mutant.file.endswith(".c"):
            built = os.path.join(folder, "mutant.o")
            must(["gcc", "-std=c11", "-O1", "-ffp-contract=off", "-D_GNU_SOURCE", "-DTD_TEST_BUILD=1",
                  f"-I{folder}", "-I.", "-Ibuild/gen", "-isystem", self.headers, "-w", "-fPIE", "-c",
                  path, "-o", built])
            if source_of(mutant) == mutant.file:  # before the library, whose own is not taken then
                return {"EMU_DOUBLES": make_variable("EMU_DOUBLES").split() + [built]}
            original = f"build/test/{CUDA}/{mutant.file[:-2]}.o"
            objects = [built if o == original else o for o in make_variable("CUDA_OBJ").split()]
            return {"CUDA_OBJ": objects}
        objects = [f"{device}/emu.o"]
        for kernel in KERNELS:
            source = f"td_cuda_{kernel}.cu"
            if mutant.file not in (source, "td_cuda_math.cuh"):
                objects.append(f"{device}/{CUDA}/td_cuda_{kernel}.o")
                continue
            built = os.path.join(folder, f"{kernel}.o")
            mine = path if mutant.file == source else os.path.join(CUDA, source)
            must([self.compiler, "-std=c++17", "-g", "-fPIC", "-ffp-contract=off", "-fno-exceptions",
                  "-fno-rtti", f"-I{folder}", "-I.", "-include", "tests/emu/emu.h"] +
                 (["-O0", "-fsanitize=thread"] if race else ["-O1"]) +
                 ["-x", "c++", "-c", mine, "-o", built])
            objects.append(built)
        return {"RACE_OBJ" if race else "EMU_OBJ": objects}

    def command(self, mutant, folder):
        """What runs the test with the mutant in it."""
        where, test = mutant.test.split()
        race = where == "race"
        objects = self.compile(mutant, folder, race)
        target = f"{folder}/emu_race" if race else f"{folder}/tests/unit/cuda/test_cuda_{where}"
        must(["make", "-s", "CONFIG=test", f"BIN={folder}", target] +
             [f"{name}={' '.join(values)}" for name, values in objects.items()])
        return [target, test]


def caught(code, output, test):
    """In words, or None: the test failed, or the emulator or the sanitizer stopped the kernel."""
    if f"[  FAILED  ] {test}" in output:
        return "test failed"
    if "ThreadSanitizer: data race" in output:
        return "race reported"
    for line in output.splitlines():
        if line.startswith("emu: "):
            return line[len("emu: "):].split(":")[0]
    return f"ended with code {code}" if code not in (0, None) else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", default="build/test/bin", help="where the tests were built")
    parser.add_argument("--only", default="", help="mutants whose name or test holds this text")
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ["UCX_MEM_EVENTS"] = "n"
    if args.bin.startswith("build/san-"):
        print("[  SKIPPED ] mutants: once, without sanitizers, is enough")
        return 0
    absent = make_variable("CUDA_ABSENT")
    if absent:
        print(f"[  SKIPPED ] mutants: {absent}")
        return 0
    shutil.rmtree(OUT, ignore_errors=True)
    builder = Builder(args.bin)
    failed = 0
    for number, mutant in enumerate(MUTANTS):
        if args.only not in f"{mutant.name} {mutant.test}":
            continue
        try:
            folder = os.path.join(OUT, str(number))
            command = builder.command(mutant, folder)
            code, output = run(command, LIMIT_S)
            why = caught(code, output, command[1])
        except (Failure, subprocess.TimeoutExpired) as error:
            why = None
            output = str(error)
        if why is None:
            failed += 1
            print(f"[  FAILED  ] {mutant.name}: not noticed by {mutant.test}\n{output[-1500:]}")
        else:
            print(f"[       OK ] {mutant.name}: {mutant.test}: {why}", flush=True)
    shutil.rmtree(OUT, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
