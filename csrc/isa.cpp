#include "isa.h"

#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstring>

#include "arrange.h"
#include "dequant.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace lean {
namespace {

#if defined(__x86_64__)

struct Features {
    bool avx2 = false;
    bool avx512 = false;
    bool amx = false;
};

uint64_t enabled_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Asks the kernel to save the tile registers of this process's threads. Without that, the first instruction that uses one is
// refused as if it were unknown. Linux 5.16 and later, Documentation/arch/x86/xstate.rst.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

Features detect() {
    unsigned a, b, c, d, b7, c7, d7;
    Features found;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return found;
    const uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return found;
    const bool ymm = (state & 0x06) == 0x06;  // SSE and AVX registers
    const bool zmm = (state & 0xe6) == 0xe6;  // and the three parts of AVX-512's
    found.avx2 = ymm && (c & bit_AVX) && (c & bit_FMA) && (c & bit_F16C) && (b7 & bit_AVX2);
    found.avx512 = found.avx2 && zmm && (b7 & bit_AVX512F) && (b7 & bit_AVX512BW) && (b7 & bit_AVX512VL) &&
                   (b7 & bit_AVX512DQ) && (c7 & bit_AVX512VNNI);
    constexpr unsigned tiles = 1u << 24, of_bytes = 1u << 25;
    constexpr uint64_t shapes_and_data = 3u << 17;
    found.amx = found.avx512 && (d7 & tiles) && (d7 & of_bytes) && (state & shapes_and_data) == shapes_and_data &&
                may_use_tiles();
    return found;
}

// Every kernel of `table` on a small fixed matrix and some tokens, compared with the portable unit.
bool agrees_with_portable(const KernelTable& table) {
    constexpr int64_t cols = 512;
    constexpr int TOKENS = MANY;  // or some instructions would first be met in a prompt
    alignas(64) static uint8_t w[STRIP * cols * 4], strip[STRIP * cols * 4];
    alignas(64) static uint8_t act[TOKENS * act_stride(ACT_F32, cols)];
    static float x[TOKENS * cols], got[TOKENS][STRIP], want[TOKENS][STRIP];
    const uint8_t* rows[TOKENS];
    float *to_got[TOKENS], *to_want[TOKENS];
    for (int64_t i = 0; i < TOKENS * cols; ++i) x[i] = static_cast<float>((i * 37 + 11) % 101 - 50) / 50.0f;
    for (int t = 0; t < TOKENS; ++t) {
        to_got[t] = got[t];
        to_want[t] = want[t];
    }
    const auto round = [&](const KernelTable& by, Partner partner) {
        for (int t = 0; t < TOKENS; ++t) {
            uint8_t* row = act + static_cast<size_t>(t) * act_stride(partner, cols);
            by.quantize[partner](x + t * cols, cols, row);
            rows[t] = row;
        }
    };
    for (int32_t k = 0; k < table.kernel_count; ++k) {
        const Kernel& kernel = table.kernels[k];
        const Kernel* reference = nullptr;
        for (int32_t p = 0; p < portable_table().kernel_count; ++p)
            if (portable_table().kernels[p].qtype == kernel.qtype) reference = &portable_table().kernels[p];
        if (reference == nullptr) continue;
        for (size_t i = 0; i < sizeof(w); ++i) w[i] = static_cast<uint8_t>((i * 73 + 5) % 60);
        const uint8_t* at = w;
        if (kernel.layout == ROWS16) {
            const Format& format = *find_format(kernel.qtype);
            table.arrange(*find_strip_format(kernel.qtype), cols / format.block, w, strip);
            at = strip;
        }
        round(table, kernel.partner);
        kernel.dot(at, kernel.rows, cols, rows, TOKENS, to_got, 0);
        round(portable_table(), reference->partner);
        reference->dot(w, kernel.rows, cols, rows, TOKENS, to_want, 0);
        float most = 1e-6f;  // a single sum may be close to zero
        for (int t = 0; t < TOKENS; ++t)
            for (int32_t r = 0; r < kernel.rows; ++r) most = std::fmax(most, std::fabs(want[t][r]));
        for (int t = 0; t < TOKENS; ++t)
            for (int32_t r = 0; r < kernel.rows; ++r)
                if (!(std::fabs(got[t][r] - want[t][r]) <= 1e-3f * most)) return false;
    }
    return true;
}

thread_local sigjmp_buf escape;

void on_fault(int) { siglongjmp(escape, 1); }

// A virtual machine may list instructions that it then refuses; that must cost speed, not the process.
bool runs(const KernelTable& table) {
    struct sigaction guard, before;
    std::memset(&guard, 0, sizeof(guard));
    guard.sa_handler = on_fault;
    sigemptyset(&guard.sa_mask);
    if (sigaction(SIGILL, &guard, &before) != 0) return false;
    volatile bool good = false;
    if (sigsetjmp(escape, 1) == 0) good = agrees_with_portable(table);
    sigaction(SIGILL, &before, nullptr);
    return good;
}

#endif

std::vector<const KernelTable*> probe() {
    std::vector<const KernelTable*> tables = {&portable_table()};
#if defined(__x86_64__)
    const Features features = detect();
    if (features.avx2 && runs(avx2_table())) tables.push_back(&avx2_table());
    if (features.avx512 && runs(avx512_table())) tables.push_back(&avx512_table());
    if (features.amx && runs(amx_table())) tables.push_back(&amx_table());
#endif
    return tables;
}

}  // namespace

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names = {portable_table().name};
#if defined(__x86_64__)
    names.push_back(avx2_table().name);
    names.push_back(avx512_table().name);
    names.push_back(amx_table().name);
#endif
    return names;
}

const std::vector<const KernelTable*>& available_tables() {
    static const std::vector<const KernelTable*> tables = probe();
    return tables;
}

}  // namespace lean
