# Tandem. `make help` lists the targets. Configurations never share objects:
#   release (default) -> build/bin        test -> build/test/bin (has --fault)
#   SAN=address,undefined | SAN=thread    -> build/san-<...>/bin (a test build)
SAN ?=
CONFIG ?= $(if $(SAN),san-$(subst $(comma),-,$(SAN)),release)
comma := ,
B := build/$(CONFIG)
BIN := $(if $(filter release,$(CONFIG)),build/bin,$(B)/bin)
GEN := build/gen
MODEL := build/models/SmolLM2-135M-Instruct.Q4_1.gguf

CC ?= gcc
PKGS := ucx libzmq libprotobuf-c libsodium libmicrohttpd gnutls jansson libpcre2-8 libutf8proc libcyaml \
        libxxhash
# Only what compiles asks pkg-config, so that a bare machine can run the set-up targets.
PKG_CFLAGS = $(shell pkg-config --cflags $(PKGS))
PKG_LIBS = $(shell pkg-config --libs $(PKGS))
# The store's cold tier: what links libkvstore.a needs them.
TIER_LIBS = $(shell pkg-config --libs liburing lmdb)
# Every process may speak to etcd.
CURL_LIBS = $(shell pkg-config --libs libcurl)
CMOCKA_LIBS = $(shell pkg-config --libs cmocka)

VERSION := 0.1.0
WARN := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wmissing-prototypes -Wvla \
        -Wformat=2 -Wno-missing-field-initializers
OPT := -O2 -g
DEFS := -D_GNU_SOURCE -DTD_VERSION=\"$(VERSION)\"
ifneq ($(CONFIG),release)
DEFS += -DTD_TEST_BUILD=1
endif
# What an overrun meets: canaries, checked copies, tables that are read-only once linked, addresses drawn
# by lot. Kernels, which index arrays by shapes that were checked before, go without canaries.
HARDEN := -D_FORTIFY_SOURCE=2 -fstack-protector-strong -fstack-clash-protection -fPIE
HARDEN_LD := -pie -Wl,-z,relro,-z,now -Wl,-z,noexecstack
ifneq ($(SAN),)
HARDEN := -fPIE
OPT := -O1 -g -fno-omit-frame-pointer
SANFLAGS := -fsanitize=$(SAN) -fno-sanitize-recover=all
endif
ifeq ($(WERROR),1)
WARN += -Werror
endif
# I1: no contraction of a*b+c by the compiler, no fast-math; fused steps are written as fmaf().
CFLAGS_ALL = -std=c11 $(OPT) $(HARDEN) -ffp-contract=off -fno-strict-aliasing -pthread $(WARN) $(SANFLAGS) \
             $(DEFS) -I. -I$(GEN) $(PKG_CFLAGS) $(CFLAGS)
LDFLAGS_ALL = -pthread $(HARDEN_LD) $(SANFLAGS) $(LDFLAGS)
LIBS_ALL = $(PKG_LIBS) $(CURL_LIBS) -lucs -lm -ldl

PROGRAMS :=
COMMON_SRC :=
include proto/module.mk common/module.mk common/model/cuda/module.mk kvstore/module.mk prefill_node/module.mk \
        decode_node/module.mk router/module.mk tests/module.mk

.DEFAULT_GOAL := all
.PHONY: all programs clean help
all: programs
programs: $(addprefix $(BIN)/,$(PROGRAMS))

$(B)/%.o: %.c $(PROTO_HEADERS)
	@mkdir -p $(@D)
	@echo "  CC      $<"
	@$(CC) $(CFLAGS_ALL) $(CFLAGS_$(subst /,_,$(basename $<))) -MMD -MP -c $< -o $@

$(B)/gen/%.o: $(GEN)/%.c
	@mkdir -p $(@D)
	@echo "  CC      $<"
	@$(CC) $(CFLAGS_ALL) -Wno-conversion -MMD -MP -c $< -o $@

$(B)/libtandem.a: $(COMMON_SRC:%.c=$(B)/%.o) $(PROTO_SRC:$(GEN)/%.c=$(B)/gen/%.o)
	@echo "  AR      $@"
	@rm -f $@
	@ar rcs $@ $^

-include $(shell find $(B) -name '*.d' 2>/dev/null)

# --- what a user runs -----------------------------------------------------------------------
.PHONY: setup model demo up down check install cleanroom bench sbom format check-layers chaos soak fuzz check-build image \
        check-image
setup:
	@deploy/setup.sh
model: setup
	@deploy/model.sh
demo: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) programs
	@deploy/demo.sh
up: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) programs
	@deploy/local.sh up
down:
	@deploy/local.sh down
# Everything is compiled before the first test starts, so no test waits for a compiler.
# Only tests need them: promtool, which comes with prometheus, for the rules, chromium for the status page,
# clang++ and its ThreadSanitizer for the emulator of CUDA devices.
check: setup model
	@deploy/setup.sh --only prometheus chromium clang libclang-rt-dev
	@deploy/cuda_headers.sh
	@$(MAKE) --no-print-directory check-layers
	@$(MAKE) --no-print-directory -j$(shell nproc) WERROR=1 check-build
	@python3 tests/run.py --san "$(SAN)" --bin "$(if $(SAN),$(BIN),build/test/bin)"
check-build: programs
ifeq ($(CONFIG),release)
	@$(MAKE) --no-print-directory CONFIG=test WERROR=1 programs tests
else
	@$(MAKE) --no-print-directory tests
endif
chaos: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) CONFIG=test programs
	@python3 tests/chaos/chaos.py --bin build/test/bin --rounds 20
# Mixed load and faults by seed, for so long; a table, and JSON in build/soak.
MINUTES ?= 10
soak: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) CONFIG=test programs
	@python3 tests/chaos/soak.py --bin build/test/bin --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))
bench: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) programs
	@python3 tests/bench/run_bench.py --model $(MODEL) $(if $(filter-out 0,$(PEERS)),--peers) \
	    $(if $(ONLY),--only $(ONLY))
# Programs, units, manual page, completion and sample configurations. PREFIX is where they will be,
# DESTDIR a root to put them below.
PREFIX ?= /usr/local
install: programs
	@deploy/install.sh "$(BIN)" "$(DESTDIR)" "$(PREFIX)"
# What the programs are linked with, package by package.
sbom: programs
	@python3 deploy/sbom.py $(addprefix $(BIN)/,$(PROGRAMS)) >build/sbom.spdx.json.new
	@mv build/sbom.spdx.json.new build/sbom.spdx.json
	@echo "build/sbom.spdx.json"
cleanroom:
	@deploy/cleanroom.sh
# OCI archives in build/image, on machines without docker too. FRESH=1: base and packages anew.
image:
	@deploy/setup.sh --only buildah mmdebstrap
	@deploy/image/build.sh $(VERSION) $(if $(filter-out 0,$(FRESH)),--fresh)
# Not part of check: it takes minutes, root, and packages that nothing else needs.
check-image: setup model
	@deploy/setup.sh --only ucx-utils
	@$(MAKE) --no-print-directory -j$(shell nproc) programs
	@$(MAKE) --no-print-directory image
	@python3 tests/run.py --image --bin $(BIN)
check-layers:
	@python3 tests/check_layers.py
format:
	@clang-format -i $$(git ls-files '*.c' '*.h' '*.cc' '*.cu' '*.cuh')
clean:
	rm -rf build/release build/bin build/test build/san-* build/gen build/cuda build/emu build/emu-race build/gpu
help:
	@echo "make            build the programs into build/bin"
	@echo "make demo       set up, build, fetch the model, serve one request, stop"
	@echo "make up|down    start / stop a cluster on this machine (port 8000)"
	@echo "make check      set up, build, run every test (SAN=address,undefined or SAN=thread)"
	@echo "make chaos      kill and freeze every process at every named step, 20 rounds"
	@echo "make soak       mixed load and faults by seed (MINUTES=10, SEED=any): nothing wrong, held or growing"
	@echo "make fuzz       libFuzzer over every decoder of outside bytes (FUZZ_SECONDS=60 each)"
	@echo "make install    programs, systemd units, manual page, samples (DESTDIR=, PREFIX=/usr/local)"
	@echo "make sbom       what the programs are linked with, as an SPDX document in build/"
	@echo "make image      OCI images of the programs and of etcd in build/image (as root; FRESH=1)"
	@echo "make check-image  build the images, and run a cluster of them"
	@echo "make check-gpu  what only a CUDA device can show; bench-gpu its figures (both say what they skip)"
	@echo "make cleanroom  run demo and check in a minimal Debian root"
	@echo "make bench      all figures, a table and a plot in build/bench (PEERS=1: llama.cpp's too)"
