COMMON_SRC := $(wildcard common/base/*.c common/wire/*.c common/transfer/*.c common/kv/*.c \
                         common/model/*.c common/model/cpu/*.c common/spec/*.c common/node/*.c \
                         common/coord/*.c common/trace/*.c)
# Instruction sets are chosen at run time, so only these files are compiled for them.
# gcc 12 spills the register tiles of these kernels unless told otherwise (DESIGN.md, "Kernels").
GCC_TILE_FLAGS := $(if $(findstring clang,$(CC)),,-fno-tree-ter -fno-tree-pre -fno-tree-reassoc)
AVX2_FLAGS := -O3 -mavx2 -mfma -mf16c -fno-stack-protector $(GCC_TILE_FLAGS)
# Kernels hold no lock and touch no shared state but their own rows: ThreadSanitizer would only make
# whole-cluster tests a hundred times slower.
ifneq ($(findstring thread,$(SAN)),)
KERNEL_SAN := -fno-sanitize=thread
endif
AVX2_FLAGS += $(KERNEL_SAN)
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
CFLAGS_common_model_cpu_td_cpu_portable := $(KERNEL_SAN) -fno-stack-protector
CFLAGS_common_kv_td_hash_avx2 := -O3 -mavx2
CFLAGS_common_model_cpu_td_cpu_avx2 := $(AVX2_FLAGS)
CFLAGS_common_model_cpu_td_cpu_avx2_attention := $(AVX2_FLAGS)
CFLAGS_common_model_cpu_td_cpu_avx2_rows := $(AVX2_FLAGS)
CFLAGS_common_model_cpu_td_cpu_avx512 := $(AVX512_FLAGS)
CFLAGS_common_model_cpu_td_cpu_avx512_attention := $(AVX512_FLAGS)
CFLAGS_common_model_cpu_td_cpu_avx512_rows := $(AVX512_FLAGS)
