# One executable for each tests/unit/<folder>/test_*.c and tests/fault/fault_*.c, found by wildcard.
TEST_SRC := $(wildcard tests/unit/*/test_*.c tests/fault/fault_*.c tests/fuzz/fuzz_*.c)
TEST_BIN := $(TEST_SRC:tests/%.c=$(BIN)/tests/%)
NODE_LIBS := $(foreach d,router prefill_node decode_node kvstore,$(if $(wildcard $(d)/*.c),$(B)/lib$(d).a))
# Programs that tests in Python start.
TEST_PROGRAMS += $(BIN)/store_worker
.PHONY: tests
tests: $(TEST_BIN) $(TEST_PROGRAMS)
# Of the benchmark client, what one target reads with.
$(BIN)/tests/fuzz/fuzz_stream $(BIN)/fuzz_stream: WITH := $(B)/tests/bench/bench_stream.o $(B)/tests/bench/bench_http.o
$(BIN)/tests/fuzz/fuzz_stream $(BIN)/fuzz_stream: $(B)/tests/bench/bench_stream.o $(B)/tests/bench/bench_http.o
$(BIN)/tests/%: $(B)/tests/%.o $(NODE_LIBS) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $< $(WITH) $(NODE_LIBS) $(B)/libtandem.a $(LIBS_ALL) $(TIER_LIBS) $(CMOCKA_LIBS) -o $@
$(BIN)/store_worker: $(B)/tests/chaos/store_worker.o $(B)/tests/bench/bench_node.o $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) -o $@
.SECONDARY:
BENCH_SRC := $(wildcard tests/bench/*.c)
ifneq ($(BENCH_SRC),)
PROGRAMS += tandem-bench
$(BIN)/tandem-bench: $(BENCH_SRC:%.c=$(B)/%.o) $(CUDA_LINK_OBJ) $(B)/librouter.a $(B)/libkvstore.a $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) $(CUDA_LIBS) -o $@
endif

# libFuzzer over every decoder of outside bytes: make fuzz FUZZ_SECONDS=60. Needs clang with its runtime;
# without it the corpus is still replayed by make check.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := $(patsubst tests/fuzz/fuzz_%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
.PHONY: fuzz fuzz-build
fuzz:
	@$(MAKE) --no-print-directory CONFIG=fuzz CC=clang OPT="-O1 -g" HARDEN=-fPIE \
	    SANFLAGS="-fsanitize=fuzzer-no-link,address,undefined" DEFS="-D_GNU_SOURCE \
	    -DTD_VERSION='\"$(VERSION)\"' -DTD_TEST_BUILD=1 -DTD_FUZZ_ENGINE=1" fuzz-build
	@for t in $(FUZZ_TARGETS); do mkdir -p build/fuzz/corpus/$$t; \
	    echo "fuzz_$$t: $(FUZZ_SECONDS) s"; \
	    UCX_MEM_EVENTS=n build/fuzz/bin/fuzz_$$t -max_total_time=$(FUZZ_SECONDS) -max_len=65536 \
	        -artifact_prefix=build/fuzz/ build/fuzz/corpus/$$t tests/fuzz/corpus/$$t \
	        >build/fuzz/$$t.log 2>&1 || { tail -20 build/fuzz/$$t.log; exit 1; }; \
	    tail -1 build/fuzz/$$t.log; done
fuzz-build: $(addprefix $(BIN)/fuzz_,$(FUZZ_TARGETS))
$(BIN)/fuzz_%: $(B)/tests/fuzz/fuzz_%.o $(NODE_LIBS) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) -fsanitize=fuzzer $(LDFLAGS_ALL) $< $(WITH) $(NODE_LIBS) $(B)/libtandem.a $(LIBS_ALL) $(TIER_LIBS) -o $@
