# The GPU backend. With nvcc the kernels are compiled for devices and linked into the programs that run
# models; CUDA=0 leaves that out. Its tests run kernels in the emulator (tests/emu), which needs clang++
# and the CUDA headers: nvcc's, or those that deploy/cuda_headers.sh fetches.
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(firstword $(wildcard /usr/local/cuda/bin/nvcc)))
CUDA ?= $(if $(NVCC),1,0)
CUDA_HOME ?= $(if $(NVCC),$(patsubst %/bin/,%,$(dir $(realpath $(NVCC)))))
CUDA_HEADERS := build/cuda-headers
# As a system's: their warnings are not ours.
CUDA_INC := $(firstword $(dir $(wildcard $(addsuffix /cuda_runtime_api.h,$(CUDA_HOME)/include $(CUDA_HEADERS)))))
CUDA_LIB := $(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib))

CUDA_SRC := $(wildcard common/model/cuda/*.c)
CUDA_OBJ := $(CUDA_SRC:%.c=$(B)/%.o)
CUDA_KERNELS := $(wildcard common/model/cuda/*.cu)
CUDA_TEXTS := $(wildcard common/model/cuda/*.h common/model/cuda/*.cuh) common/base/td_float.h
$(CUDA_OBJ) $(B)/tests/unit/cuda/%.o $(B)/tests/emu/%.o $(B)/tests/gpu/%.o: PKG_CFLAGS += $(addprefix -isystem ,$(CUDA_INC))

# Where nccl.h is beside CUDA's headers or the system's; its library is looked for when a node starts.
ifeq ($(NCCL),0)
$(CUDA_OBJ) $(B)/tests/unit/cuda/%.o $(B)/tests/emu/%.o $(B)/tests/gpu/%.o: DEFS += -DTD_CUDA_NO_NCCL
endif

# One code for each generation, and PTX of the newest for those that come. I1: no contraction.
CUDA_ARCHS ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 \
              -gencode arch=compute_100,code=[sm_100,compute_100]
NVCC_FLAGS := -std=c++17 -O3 -fmad=false -Xcompiler -fPIC,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti $(CUDA_ARCHS)
CUDA_DEVICE_OBJ := $(CUDA_KERNELS:%.cu=build/cuda/%.o)
build/cuda/%.o: %.cu $(CUDA_TEXTS)
	@mkdir -p $(@D)
	@echo "  NVCC    $<"
	@$(NVCC) $(NVCC_FLAGS) -Xptxas -v -I. -c $< -o $@ 2>$(@:.o=.log) || { cat $(@:.o=.log); exit 1; }
# What ptxas says of every kernel, as a table: registers, shared memory, spills, blocks of a
# multiprocessor.
.PHONY: cuda-report
cuda-report: $(CUDA_DEVICE_OBJ)
	@python3 tests/emu/ptxas_report.py $(CUDA_DEVICE_OBJ:.o=.log)

# Programs that run models are linked with it. A sanitizer's build has the CPU alone.
ifneq ($(CUDA),0)
ifeq ($(SAN),)
CUDA_LINK_OBJ := $(CUDA_OBJ) $(CUDA_DEVICE_OBJ)
CUDA_LIBS := -L$(CUDA_LIB) -lcudart_static -lrt -lpthread -ldl
endif
endif

# --- the emulator and the tests in it ------------------------------------------------------------
EMU_CXX ?= $(firstword $(shell command -v clang++ clang++-14 2>/dev/null))
EMU_CXXFLAGS := -std=c++17 -g -fPIC -ffp-contract=off -fno-exceptions -fno-rtti -Wall -Wextra -I.
EMU_TEXTS := $(wildcard tests/emu/*.h)
EMU_RUNTIME_OBJ := $(B)/tests/emu/emu_cudart.o $(B)/tests/emu/emu_streams.o
EMU_OBJ := build/emu/emu.o $(CUDA_KERNELS:%.cu=build/emu/%.o)
build/emu/emu.o: tests/emu/emu.cc $(EMU_TEXTS)
	@mkdir -p $(@D)
	@echo "  EMU     $<"
	@$(EMU_CXX) $(EMU_CXXFLAGS) -O2 -c $< -o $@
build/emu/%.o: %.cu $(CUDA_TEXTS) $(EMU_TEXTS)
	@mkdir -p $(@D)
	@echo "  EMU     $<"
	@$(EMU_CXX) $(EMU_CXXFLAGS) -O2 -include tests/emu/emu.h -x c++ -c $< -o $@

# In place of the runtime and of NCCL's library.
EMU_DOUBLES := $(EMU_RUNTIME_OBJ) $(B)/tests/emu/emu_nccl.o
EMU_CUDA_OBJ := $(filter-out %/td_cuda_nccl.o,$(CUDA_OBJ))

CUDA_TEST_SRC := $(wildcard tests/unit/cuda/test_*.c)
CUDA_TEST_BIN := $(CUDA_TEST_SRC:tests/%.c=$(BIN)/tests/%)
# What keeps them from being built. Fibers of the emulator are no threads that a thread sanitizer knows;
# it has a build of its own for races.
CUDA_ABSENT := $(if $(findstring thread,$(SAN)),its fibers and ThreadSanitizer do not go together,$(if \
               $(EMU_CXX),$(if $(CUDA_INC),,no CUDA headers: deploy/cuda_headers.sh fetches them),no clang++))
ifeq ($(CUDA_ABSENT),)
$(CUDA_TEST_BIN): $(BIN)/tests/%: $(B)/tests/%.o $(EMU_CUDA_OBJ) $(EMU_OBJ) $(EMU_DOUBLES) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(CMOCKA_LIBS) -o $@
# The nodes with the emulator in place of a device, for tests of whole clusters.
EMU_NODES := $(BIN)/emu/tandem-prefill $(BIN)/emu/tandem-decode
TEST_PROGRAMS += $(EMU_NODES)
EMU_NODE_OBJ := $(EMU_CUDA_OBJ) $(EMU_OBJ) $(EMU_DOUBLES)
$(EMU_NODES): $(BIN)/emu/tandem-%: $(B)/%_node/main.o $(EMU_NODE_OBJ) $(B)/lib%_node.a $(B)/libkvstore.a \
        $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(TIER_LIBS) -o $@
# What a machine with devices runs, here to see that it does.
TEST_PROGRAMS += $(BIN)/emu/gpu_nccl
$(BIN)/emu/gpu_nccl: $(B)/tests/gpu/gpu_nccl_main.o $(EMU_NODE_OBJ) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) -o $@
# ThreadSanitizer finds what the orders of threads do not show. At -O0: optimised code hides races. Not
# compiled for it are our own files in C, which run one after the other.
ifeq ($(SAN),)
TEST_PROGRAMS += $(BIN)/emu_race
endif
RACE_OBJ := build/emu-race/emu.o $(CUDA_KERNELS:%.cu=build/emu-race/%.o)
build/emu-race/emu.o: tests/emu/emu.cc $(EMU_TEXTS)
	@mkdir -p $(@D)
	@echo "  EMU     $< (races)"
	@$(EMU_CXX) $(EMU_CXXFLAGS) -O1 -DEMU_TSAN=1 -c $< -o $@
build/emu-race/%.o: %.cu $(CUDA_TEXTS) $(EMU_TEXTS)
	@mkdir -p $(@D)
	@echo "  EMU     $< (races)"
	@$(EMU_CXX) $(EMU_CXXFLAGS) -O0 -fsanitize=thread -include tests/emu/emu.h -x c++ -c $< -o $@
$(BIN)/emu_race: $(B)/tests/emu/race_main.o $(EMU_DOUBLES) $(RACE_OBJ) $(EMU_CUDA_OBJ) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(EMU_CXX) -fsanitize=thread -pthread $(filter-out -fsanitize%,$(LDFLAGS)) $^ $(LIBS_ALL) -o $@
else
# They say that they were skipped, and why, so that they are counted.
$(CUDA_TEST_BIN): $(BIN)/tests/%:
	@mkdir -p $(@D)
	@printf '#!/bin/sh\necho "[  SKIPPED ] $(CUDA_ABSENT)"\n' >$@
	@chmod +x $@
endif

# On a machine with a device: the same tests linked with the CUDA runtime.
# Two ends in one process are two ranks on one device, which NCCL refuses: gpu_nccl does what can be done.
GPU_TEST_BIN := $(filter-out %/test_cuda_nccl,$(CUDA_TEST_SRC:tests/%.c=build/gpu/tests/%))
$(GPU_TEST_BIN): build/gpu/tests/%: $(B)/tests/%.o $(CUDA_OBJ) $(CUDA_DEVICE_OBJ) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(CMOCKA_LIBS) $(CUDA_LIBS) -o $@
build/gpu/gpu_copy: $(B)/tests/gpu/gpu_copy_main.o $(CUDA_OBJ) $(CUDA_DEVICE_OBJ) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(CUDA_LIBS) -o $@
build/gpu/gpu_nccl: $(B)/tests/gpu/gpu_nccl_main.o $(CUDA_OBJ) $(CUDA_DEVICE_OBJ) $(B)/libtandem.a
	@mkdir -p $(@D); echo "  LD      $@"
	@$(CC) $(LDFLAGS_ALL) $^ $(LIBS_ALL) $(CUDA_LIBS) -o $@
.PHONY: gpu-programs
gpu-programs: $(GPU_TEST_BIN) build/gpu/gpu_copy build/gpu/gpu_nccl
# One command each on a machine with a device; elsewhere they say what they skip, and why.
.PHONY: check-gpu bench-gpu
GPU_READY = $(if $(filter 0,$(CUDA)),,gpu-programs)
check-gpu: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) programs $(GPU_READY)
	@python3 tests/gpu/check_gpu.py
bench-gpu: setup model
	@$(MAKE) --no-print-directory -j$(shell nproc) programs $(GPU_READY)
	@python3 tests/gpu/bench_gpu.py
