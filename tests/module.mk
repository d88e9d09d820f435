# One executable for each tests/unit/<folder>/test_*.c and tests/fault/fault_*.c, found by wildcard.
TEST_SRC := $(wildcard tests/unit/*/test_*.c tests/fault/fault_*.c tests/fuzz/fuzz_*.c)
TEST_BIN := $(TEST_SRC:tests/%.c=$(BIN)/tests/%)
NODE_LIBS := $(foreach d,router prefill_node decode_node kvstore,$(if $(wildcard $(d)/*.c),$(B)/lib$(d).a))
.PHONY: tests
tests: $(TEST_BIN)
$(BIN)/tests/%: $(B)/tests/%.o $(NODE_LIBS) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $< $(NODE_LIBS) $(B)/libtandem.a $(LIBS_ALL) $(CMOCKA_LIBS) -o $@
.PRECIOUS: $(B)/tests/%.o
BENCH_SRC := $(wildcard tests/bench/*.c)
ifneq ($(BENCH_SRC),)
PROGRAMS += tandem-bench
$(BIN)/tandem-bench: $(BENCH_SRC:%.c=$(B)/%.o) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
endif
