// Instructions that attention.cu is made of: mbarriers, named barriers, conversions, wgmma with its operands in shared memory.
#pragma once
#include "attention_shape.cuh"

__device__ inline u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ inline void barrier_init(u64* b, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared(b)), "r"(count) : "memory");
}

__device__ inline void arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared(b)) : "memory");
}

__device__ inline void arrive_with_copies(u64* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(shared(b)) : "memory");
}

__device__ inline bool is_complete(u64* b, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
    return done != 0;
}

__device__ inline void wait(u64* b, u32 parity) {
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\n"
                 "DONE:\n}" :: "r"(shared(b)), "r"(parity) : "memory");
}

__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int Id, int Count> __device__ inline void named_barrier() {
    asm volatile("bar.sync %0, %1;" :: "n"(Id), "n"(Count) : "memory");
}

// Of the 128 threads of a warpgroup: whether all say yes.
__device__ inline bool all_agree(u32 warpgroup, bool yes) {
    u32 all;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %2, 0;\nbar.red.and.pred q, %1, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(all) : "r"(warpgroup + 4), "r"((u32)yes) : "memory");
    return all != 0;
}

__device__ inline void warpgroup_barrier(u32 warpgroup) {
    asm volatile("bar.sync %0, 128;" :: "r"(warpgroup + 2) : "memory");
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float bits_to_float(u32 x) { return __uint_as_float(x); }

__device__ inline u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ inline u32 pack_f16(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ inline float2 unpack_f16(u32 v) {
    float2 pair;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(pair.x), "=f"(pair.y) : "r"(v));
    return pair;
}

// (low, high) -> two halves of the format that latents and probabilities have.
__device__ inline u32 pack(float low, float high) { return FP8 ? pack_f16(low, high) : pack_bf16(low, high); }

__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
    u32 v;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

__device__ inline void store_shared(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ inline uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ inline void copy16(u32 to, u64 from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline uint4 load_or_zero(u64 row, u32 offset) {
    return row ? load16((const u8*)row + offset) : make_uint4(0, 0, 0, 0);
}

// 16-byte chunk `chunk` of row `row` of a panel: its offset.
__device__ inline u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// wgmma: matrix descriptors. Rows of 128 bytes, groups of 8 rows 1,024 bytes apart; transposed also panels PANEL bytes apart.
__device__ inline u64 descriptor(u32 at) { return 0x4000004000000000ull | ((at >> 4) & 0x3fff); }
__device__ inline u64 transposed_descriptor(u32 at) { return descriptor(at) | ((u64)(PANEL >> 4) << 16); }
constexpr u64 STEP = 32 >> 4, TRANSPOSED_STEP = 16 * 128 >> 4, PANEL_STEP = PANEL >> 4;

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(Pending) : "memory");
}

// Keeps the compiler from reading sums of products ahead of the wait for them.
template <int N> __device__ inline void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define F64(d, i) F16(d, i), F16(d, i + 16), F16(d, i + 32), F16(d, i + 48)

#define SCORES_OF(TYPE)                                                                                                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"                                             \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                     \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                          \
                 "%32, %33, p, 1, 1, 0, 0;\n}"                                                                                \
                 : F16(s, 0), F16(s, 16) : "l"(a), "l"(b), "r"((u32)add))

__device__ inline void multiply_rope(float (&s)[32], u64 a, u64 b, bool add) { SCORES_OF("bf16"); }

#if FP8
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif
__device__ inline void multiply_latents(float (&s)[32], u64 a, u64 b, bool add) { SCORES_OF(ELEMENT); }

__device__ inline void multiply_values(float (&o)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, 1, 1, 1, 0, 1;"
                 : F64(o, 0), F64(o, 64) : "l"(a), "l"(b));
}
