// Thread block clusters of CLUSTER CTAs: barriers, and shared memory of other CTAs. CLUSTER = 1 needs none of it.
#pragma once
#include "common.cuh"

__device__ inline u32 cluster_rank() {
    if (CLUSTER == 1) return 0;
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ inline void cluster_arrive() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// No memory access is ordered by it: says that this CTA runs, or that it is done with the others' shared memory, where what it
// read there has been used before (a value that was stored or added up has come).
__device__ inline void cluster_arrive_relaxed() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline void cluster_sync() {
    if (CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// Shared memory of another CTA of the cluster, at the same offset as `p` here.
__device__ inline u32 remote(const void* p, u32 cta) {
    u32 a;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"((u32)__cvta_generic_to_shared(p)), "r"(cta));
    return a;
}

__device__ inline u32 read_from(const u32* p, u32 cta) {
    if (CLUSTER == 1) return *(const volatile u32*)p;
    u32 v;
    asm volatile("ld.relaxed.cluster.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote(p, cta)) : "memory");
    return v;
}

__device__ inline i32 read_from(const i32* p, u32 cta) {
    return (i32)read_from((const u32*)p, cta);
}

__device__ inline uint4 read16_from(const void* p, u32 cta) {
    uint4 v;
    if (CLUSTER == 1) return *(const uint4*)p;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(remote(p, cta)) : "memory");
    return v;
}

__device__ inline void write_to(i32* p, u32 cta, i32 v) {
    if (CLUSTER == 1) *(volatile i32*)p = v;
    else asm volatile("st.relaxed.cluster.shared::cluster.u32 [%0], %1;" :: "r"(remote(p, cta)), "r"(v) : "memory");
}

__device__ inline i32 swap_if(i32* p, u32 cta, i32 seen, i32 value) {
    if (CLUSTER == 1) return atomicCAS(p, seen, value);
    i32 old;
    asm volatile("atom.relaxed.cluster.shared::cluster.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : "r"(remote(p, cta)), "r"(seen), "r"(value) : "memory");
    return old;
}

__device__ inline i32 raise_to(i32* p, u32 cta, i32 value) {
    if (CLUSTER == 1) return atomicMax(p, value);
    i32 old;
    asm volatile("atom.relaxed.cluster.shared::cluster.max.s32 %0, [%1], %2;"
                 : "=r"(old) : "r"(remote(p, cta)), "r"(value) : "memory");
    return old;
}
