/* Counts edges of the compiled modules for libFuzzer. gcc has no inline counters as clang has them: it calls
   __sanitizer_cov_trace_pc in each basic block. The library comes before the sanitizer's own, whose function is empty. */
#include <stdint.h>

enum { COUNTERS = 1 << 16 };
static uint8_t counters[COUNTERS];
static uintptr_t places[2 * COUNTERS]; /* of each counter: an address, and flags */

void __sanitizer_cov_8bit_counters_init(uint8_t *begin, uint8_t *end);
void __sanitizer_cov_pcs_init(const uintptr_t *begin, const uintptr_t *end);

void __sanitizer_cov_trace_pc(void) {
    uint64_t address = (uintptr_t)__builtin_return_address(0);
    counters[address * 0x9E3779B97F4A7C15u >> 48]++;
}

/* gcc reports comparisons of floating-point numbers, too, which libFuzzer does not use. */
void __sanitizer_cov_trace_cmpf(float left, float right) { (void)left, (void)right; }
void __sanitizer_cov_trace_cmpd(double left, double right) { (void)left, (void)right; }

void begin_counting(void) {
    for (int at = 0; at < COUNTERS; at++)
        places[2 * at] = (uintptr_t)(counters + at);
    __sanitizer_cov_8bit_counters_init(counters, counters + COUNTERS);
    __sanitizer_cov_pcs_init(places, places + 2 * COUNTERS);
}
