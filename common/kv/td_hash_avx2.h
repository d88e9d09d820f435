/* td_hash_avx2.h - for td_block_content_hash(), where the CPU has AVX2. Threads: any. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/** XXH3_64bits(). */
uint64_t td_hash_avx2(const void *bytes, size_t len);
