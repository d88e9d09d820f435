/* XXH3 with AVX2: a library that is built for every x86-64 has it with SSE2, at half the speed. The
 * same code, by its header, so the same hashes. */
#include "common/kv/td_hash_avx2.h"

#if defined(__x86_64__)
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t td_hash_avx2(const void *bytes, size_t len)
{
    return XXH3_64bits(bytes, len);
}
#endif
